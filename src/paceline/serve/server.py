"""The server as a process: listen, start the engine, drain on a signal, and an exit code that tells the truth.

    0   stopped as asked
    1   the engine died for good

A first SIGTERM or SIGINT drains: new requests get 503 (so does /ready), running ones have `drain_s` to finish. A second
one ends them now.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import uvicorn

from paceline.engine.messages import EngineInfo
from paceline.errors import ConfigError
from paceline.serve.app import create_app
from paceline.serve.batch.manager import Batches
from paceline.serve.context import ServerContext
from paceline.serve.early import bind
from paceline.serve.engine_port import Engine
from paceline.serve.outbox import Outbox
from paceline.serve.protocol import BoundedProtocol
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.serve")
_LINGER_S = 3.0  # for last bytes to go out once nothing runs any more
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

OnListening = Callable[[str], None]
OnReady = Callable[[str, EngineInfo], None]


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own ideas about signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    engine: Engine,
    settings: ServeSettings,
    *,
    tokenizer: Tokenizer | None = None,
    starting: asyncio.Task[EngineInfo] | None = None,
    expected_tokenizer: Path | None = None,
    on_listening: OnListening | None = None,
    on_ready: OnReady | None = None,
) -> int:
    """Serve until told to stop; the exit code. Signals are handled where this is the main thread.

    starting            `engine.start()`, if it has begun before this was called
    expected_tokenizer  the folder that the engine will most likely name: its tokenizer is loaded meanwhile

    `on_listening(url)` is called once the port is bound, `on_ready(url, info)` once requests are answered. Raises
    ConfigError for a port or certificate that cannot be used, and whatever kept the engine from starting.
    """
    bound = bind(settings.host, settings.port)
    try:
        server = Server(engine, settings, bound, tokenizer)
        if on_listening is not None:
            on_listening(server.url)
        if expected_tokenizer is not None:
            server.context.expect_tokenizer(expected_tokenizer)
        return await server.serve(on_ready, starting)
    finally:
        bound.close()


class Server:
    """One serving process around an engine. `stop()` may be called from the event loop, twice to hurry."""

    def __init__(
        self, engine: Engine, settings: ServeSettings, bound: socket.socket, tokenizer: Tokenizer | None = None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._bound = bound
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        app = create_app(engine, settings, tokenizer)
        self.context: ServerContext = app.state.context
        self._batches: Batches = app.state.batches
        self._uvicorn = _Uvicorn(_uvicorn_config(app, settings))
        if not settings.keys and settings.host not in _LOOPBACK:
            log.warning("listening on %s without any API key: whoever reaches this port may use it", settings.host)

    @property
    def url(self) -> str:
        """Where to reach it from this machine."""
        host, port = self._bound.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        return f"{'https' if self._settings.tls_certfile else 'http'}://{shown}:{port}"

    def stop(self) -> None:
        """Drain and end; called again, end now."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def serve(self, on_ready: OnReady | None = None, starting: asyncio.Task[EngineInfo] | None = None) -> int:
        """Serve until stopped; the exit code. Raises what kept the engine from starting.

        `starting` is the engine's start, if it has begun.
        """
        with self._signals():
            listening = asyncio.create_task(self._uvicorn.serve(sockets=[self._bound]))
            working = asyncio.create_task(self._work(on_ready, starting))
            try:
                await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    listening.result()  # raises what ended it
                    return 1
                return await working
            finally:
                working.cancel()
                await self._engine.close()
                self._uvicorn.should_exit = True
                await asyncio.wait({listening, working})

    async def _work(self, on_ready: OnReady | None, starting: asyncio.Task[EngineInfo] | None) -> int:
        """Start, serve, drain."""
        stopping = asyncio.create_task(self._stop.wait())
        if starting is None:
            starting = asyncio.create_task(self._engine.start())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0  # stopped before it was ready
            info = await starting
            await self.context.model()  # a tokenizer that does not fit ends the start
            await self._batches.start()
            if on_ready is not None:
                on_ready(self.url, info)
            dying = asyncio.create_task(self._engine.wait_dead())
            await asyncio.wait({dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                log.error("the engine is dead; stopping: %s", dying.result())
                return 1
            dying.cancel()
            await self._drain()
            return 0
        finally:
            stopping.cancel()
            starting.cancel()
            await self._batches.stop()

    async def _drain(self) -> None:
        self.context.draining = True
        log.info("draining: no new requests, up to %g s for those that run", self._settings.drain_s)
        await self._batches.stop()  # they go on after the next start, and need no time now
        waits = [asyncio.create_task(event.wait()) for event in (self.context.idle, self._hurry)]
        await asyncio.wait(waits, timeout=self._settings.drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self.context.idle.is_set():
            log.warning("ending the requests that still run")

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in handled:
                loop.add_signal_handler(number, self.stop)
        except (NotImplementedError, ValueError, RuntimeError):  # not the main thread, or no such thing here
            yield
            return
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


def _uvicorn_config(app: Any, settings: ServeSettings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]  # uvicorn calls it, whatever it is
            BoundedProtocol,
            max_head_bytes=settings.max_head_bytes,
            head_timeout_s=settings.head_timeout_s,
            outbox=Outbox(),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # we write our own, with request ids
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(_LINGER_S),
        ssl_certfile=settings.tls_certfile,
        ssl_keyfile=settings.tls_keyfile,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the TLS certificate {settings.tls_certfile} or key {settings.tls_keyfile} cannot be used: {error}"
        ) from error
    return config
