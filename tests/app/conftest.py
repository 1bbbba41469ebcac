"""The real default model, loaded once for the tests of this room."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paceline.app import store
from paceline.app.llm import LLM


@pytest.fixture(scope="session")
def model_file() -> str:
    """Path of the default model, which `./dev test` fetches."""
    path = store.cached_path(store.KNOWN[0], store.default_cache_dir(os.environ))
    if path is None:
        pytest.skip("the default model is not here; `paceline pull smollm2-135m` fetches it")
    return str(path)


@pytest.fixture(scope="session")
def llm(model_file: str) -> Iterator[LLM]:
    """A small KV pool, so that waiting and preemption happen."""
    with LLM(model_file, max_model_len=512, kv_gib=0.05, max_num_seqs=8, threads=1) as one:
        yield one
