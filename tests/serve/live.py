"""A real server on a real port in a thread of its own, and a plain client for it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from paceline.errors import PacelineError
from paceline.serve.early import bind
from paceline.serve.server import Server
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine

T = TypeVar("T")
DEADLINE_S = 30.0
PLAIN = ServeSettings()


class Live:
    """A running server. `call` runs a function on its event loop."""

    def __init__(self, settings: ServeSettings, tokenizer: Tokenizer, scheduler: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self.start_error: PacelineError | None = None  # what the engine's start shall raise
        self._settings = settings
        self._scheduler = scheduler
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-server", daemon=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = FakeEngine(**self._scheduler)
        self.engine.start_error = self.start_error
        self.bound = bind("127.0.0.1", 0)
        try:
            self.server = Server(self.engine, self._settings, self.bound, self.tokenizer)
            self.url = self.server.url
            self._up.set()
            self.exit_code = await self.server.serve()
        except BaseException as error:
            self.error = error
        finally:
            self.bound.close()

    def start(self, *, wait_ready: bool = True) -> None:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S)
        if wait_ready:
            self.until(lambda: self.get("/ready").status_code == 200)

    def stop(self) -> None:
        if self._thread.is_alive():
            for _ in range(2):
                self.call(self.server.stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not stop"
        self.client.close()

    def join(self) -> int | None:
        """Wait until the server has ended by itself."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not end"
        return self.exit_code

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE_S)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.01)
        raise AssertionError("it did not come true in time")

    def until_idle(self) -> None:
        """No request lives, and every KV block is free again or merely cached."""
        self.until(lambda: self.call(lambda: self.engine.live == 0 and self.engine.held_blocks == 0))
        self.call(self.engine.scheduler.check_integrity)

    def says(self, text: str) -> None:
        """What every request is answered."""
        ids = tuple(self.tokenizer.encode(text))
        self.engine.backend.script = lambda spec: ids

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed answer, the last one "[DONE]" if it came."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            response.read()
            assert response.status_code == 200, response.text
            return events_of(response.text)

    def small_send_buffers(self) -> None:
        """Make the kernel hold little of what a reader does not take."""
        self.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        return sum(value for found, value in self.samples(name) if labels.items() <= found.items())

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value


def events_of(text: str) -> list[Any]:
    events: list[Any] = []
    for block in map(str.lstrip, text.split("\n\n")):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block.strip() == "" or block.startswith(":"), block
    return events


@contextmanager
def live_server(
    tokenizer: Tokenizer, settings: ServeSettings = PLAIN, *, wait_ready: bool = True, **scheduler: Any
) -> Iterator[Live]:
    live = Live(settings, tokenizer, scheduler)
    live.start(wait_ready=wait_ready)
    try:
        yield live
    finally:
        live.stop()
