"""The real default model, for what is held against it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.app.store import default_cache_dir, find_known


@pytest.fixture(scope="session")
def default_path() -> Path:
    """The default model's file; tests that need it skip where it has not been fetched."""
    known = find_known("smollm2-135m")
    assert known is not None
    path = default_cache_dir(os.environ) / known.file_name
    if not path.is_file():
        pytest.skip(f"the default model is not at {path}: run `paceline pull smollm2-135m`")
    return path
