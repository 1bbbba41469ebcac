"""One shared server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, live_server
from tests.text.conftest import default_tokenizer, default_tokenizer_dir

__all__ = ["default_tokenizer", "default_tokenizer_dir"]


@pytest.fixture(scope="session")
def shared_server(default_tokenizer: Tokenizer) -> Iterator[Live]:
    with live_server(default_tokenizer) as live:
        yield live


@pytest.fixture
def live(shared_server: Live) -> Iterator[Live]:
    shared_server.says(" one two three")
    shared_server.engine.backend.seen.clear()
    yield shared_server
    shared_server.engine.step_s = 0.0
    shared_server.engine.paused = False
    shared_server.engine.reject = None
    shared_server.until_idle()
