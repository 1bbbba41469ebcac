"""Without the distribution everything works, and the reason is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.runtime.kernels import native


@pytest.fixture(autouse=True)
def needs_native() -> Iterator[None]:
    """Overrides the room's: this must work everywhere."""
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paceline_native", None)
    reason = native.unavailable()
    assert reason is not None
    assert native.INSTALL in reason
    with pytest.raises(ImportError, match="native kernels"):
        native.pack(torch.zeros(2, 2))


def test_a_module_that_does_not_load_is_no_missing_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "paceline_native"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a processor with AVX2 is needed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "paceline_native", raising=False)
    assert native.unavailable() == "the native kernels do not load: a processor with AVX2 is needed"
