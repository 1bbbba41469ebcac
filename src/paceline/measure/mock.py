"""A server that plays scripted bytes at scripted times, and says when it really wrote them.

`Play` is what one request gets: bytes at offsets from the moment its last byte was read, then an end. `MockServer`
asks a handler for the play of each request. Nothing here knows what the bytes mean; `mockapi.py` makes them look like
an OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import cast

import httptools

from paceline.measure.alarm import Alarm, clock


class End(Enum):
    """What happens after the last bytes of a play."""

    KEEP = "keep"  # the connection stays open for the next request
    FIN = "fin"  # clean close
    RESET = "reset"  # RST
    HANG = "hang"  # nothing: the connection stays silent


@dataclass(frozen=True, slots=True)
class Play:
    """One answer. `steps`: (seconds after the request came in, bytes), in order; `end_s` like a last step."""

    steps: Sequence[tuple[float, bytes]]
    end: End = End.KEEP
    end_s: float | None = None  # None: with the last step
    name: str = ""  # under which the real times are logged; "": not logged


@dataclass(frozen=True, slots=True)
class MockRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float  # clock() when its last byte was read


Handler = Callable[[MockRequest], Play]


@dataclass(slots=True)
class PlayLog:
    """When a play's request came and its steps really were written, on the clock."""

    received: float
    planned_s: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


class _Peer(asyncio.Protocol):
    """One client's connection; requests on it are answered one after another."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._transport: asyncio.Transport
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True

    def data_received(self, data: bytes) -> None:
        self._at = clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        request = MockRequest(method, self._url.decode(), self._headers, b"".join(self._body), self._at)
        self._url, self._headers, self._body = b"", {}, []
        self._server.requests += 1
        play = self._server.handler(request)
        log = None
        if play.name:
            log = self._server.logs[play.name] = PlayLog(request.at)
        self._play(play, 0, request.at, log)

    def _play(self, play: Play, place: int, start: float, log: PlayLog | None) -> None:
        """Write every step that is due, then wait for the next."""
        steps = play.steps
        while place < len(steps):
            offset, data = steps[place]
            if start + offset > clock():
                self._server.alarm.at(start + offset, partial(self._play, play, place, start, log))
                return
            if self._gone:
                return
            self._transport.write(data)
            if log is not None:
                log.written.append(clock())
                log.planned_s.append(offset)
            place += 1
        ends = start + (play.end_s if play.end_s is not None else 0.0)
        if ends > clock():
            self._server.alarm.at(ends, lambda: self._end(play.end))
        else:
            self._end(play.end)

    def _end(self, end: End) -> None:
        if self._gone:
            return
        if end is End.FIN:
            self._transport.close()
        elif end is End.RESET:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:  # close at once, unsent data thrown away: the peer sees a reset
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


class MockServer:
    """An in-process server on a free port of 127.0.0.1. An async context manager.

    async with MockServer(handler) as server:
        ... server.url ...
    """

    def __init__(self, handler: Handler, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.handler = handler
        self.logs: dict[str, PlayLog] = {}
        self.requests = 0
        self.accepted = 0  # connections
        self.alarm: Alarm
        self._tls = tls
        self._port = port
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> MockServer:
        loop = asyncio.get_running_loop()
        self.alarm = Alarm(loop)
        self._server = await loop.create_server(
            lambda: _Peer(self), "127.0.0.1", self._port, ssl=self._tls, backlog=4096
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.alarm.close()
        await asyncio.sleep(0)


# Bytes of HTTP/1.1 answers

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


def http_head(
    status: int = 200, content_type: str = "text/event-stream", *, chunked: bool = True, **more: str
) -> bytes:
    """A response head. Further headers as keywords, `_` for `-`."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", f"content-type: {content_type}"]
    if chunked:
        lines.append("transfer-encoding: chunked")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    """One HTTP/1.1 chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def whole(status: int, body: bytes, content_type: str = "application/json", **more: str) -> bytes:
    """A complete response with its length told."""
    return http_head(status, content_type, chunked=False, content_length=str(len(body)), **more) + body


def streamed(
    events: Sequence[tuple[float, bytes]], *, end: End = End.KEEP, name: str = "", head_s: float = 0.0
) -> Play:
    """A chunked event stream: head at `head_s`, each piece of the body as a chunk at its time, then the last chunk."""
    steps = [(head_s, http_head())]
    steps += [(at, chunk(data)) for at, data in events]
    if end is End.KEEP:
        steps.append((steps[-1][0], LAST_CHUNK))
    return Play(steps, end, name=name)
