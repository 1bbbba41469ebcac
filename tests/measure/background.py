"""A mock server on a thread, for what blocks or runs in processes of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from paceline.measure.mock import MockRequest, MockServer, Play


class Background:
    """Serves `handler` while inside; `url` is where."""

    def __init__(self, handler: Callable[[MockRequest], Play]) -> None:
        self._handler = handler
        self._ready = threading.Event()
        self.url = ""

    def __enter__(self) -> Background:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)
        return self

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with MockServer(self._handler) as server:
            self.url = server.url
            self._ready.set()
            await self._over.wait()

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
