"""The default model, ours and transformers', loaded once for all tests that ask."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.app.store import default_cache_dir, find_known
from paceline.runtime.kernels.native import set_threads, unavailable
from paceline.runtime.load import LoadedModel, load_model
from tests.runtime.equality import Ties
from tests.runtime.reference import Reference

TIES = pytest.StashKey[Ties]()


@pytest.fixture(scope="session")
def ties(pytestconfig: pytest.Config) -> Ties:
    """Where equality tests count their near ties."""
    return pytestconfig.stash.setdefault(TIES, Ties())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How often a near tie was decided the other way: each would be an error if ties were not allowed for."""
    counted = config.stash.get(TIES, None)
    if counted is not None:
        terminalreporter.write_line(f"equality: {counted.tokens} tokens, {counted.near_ties} near ties the other way")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that meet at every operation lose more on a busy machine than they win on an idle one."""
    torch.set_num_threads(1)
    if unavailable() is None:
        set_threads(1)


@pytest.fixture(scope="session")
def default_path() -> Path:
    """The default model's file; tests that need it skip where it has not been fetched."""
    known = find_known("smollm2-135m")
    assert known is not None
    path = default_cache_dir(os.environ) / known.file_name
    if not path.is_file():
        pytest.skip(f"the default model is not at {path}: run `paceline pull smollm2-135m`")
    return path


@pytest.fixture(scope="session")
def default_model(default_path: Path) -> LoadedModel:
    """The default model on our own road, float32 on the CPU."""
    return load_model(default_path, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def reference(default_path: Path) -> Reference:
    """The default model as transformers reads and runs it."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        # transformers parses the file for the configuration and again for the weights: seconds each time.
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        model = AutoModelForCausalLM.from_pretrained(
            str(default_path.parent), gguf_file=default_path.name, dtype=torch.float32
        )
    return Reference(model.eval())
