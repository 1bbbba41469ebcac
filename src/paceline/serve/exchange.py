"""Bodies in, bytes out: reading under limits, answering, streaming, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
import pydantic_core
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import BadRequest, EngineDead, EngineError, EngineNotReady, Overloaded, RequestError, TooLarge
from paceline.serve.settings import ServeSettings

log = logging.getLogger("paceline.serve")
_T = TypeVar("_T")
_json = msgspec.json.Encoder()
NOT_READY_RETRY_S = 5
_MOST_DISCARDED = 64 << 20  # bytes of a body over the limit that are read to no end
_DISCARD_S = 5.0


class UnsupportedMediaType(RequestError):
    """415: not JSON."""

    status = 415


class SlowBody(RequestError):
    """408: the body did not arrive in time."""

    status = 408


def encode_json(value: Any) -> bytes:
    """Compact UTF-8 JSON."""
    return _json.encode(value)


class JsonResponse(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


async def read_json(request: Request, settings: ServeSettings) -> dict[str, Any]:
    """The body as a JSON object. The limit holds while reading: what is over it is never kept.

    Raises TooLarge, SlowBody, UnsupportedMediaType, BadRequest; ClientDisconnect.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps web pages from posting here unasked: a browser sends this type only after asking (CORS).
        raise UnsupportedMediaType(f"content-type should be application/json, not {kind[:64]!r}")
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            raw = await _read_body(request, settings.max_body_bytes)
    except TimeoutError:
        raise SlowBody(f"the body did not arrive within {settings.body_timeout_s:g} s") from None
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body should be a JSON object")
    return body


async def _discard(chunks: AsyncGenerator[bytes]) -> None:
    """Let a client that is about to be refused finish, within bounds.

    Closing on bytes that were not read resets the connection, and the client would see that instead of the answer.
    """
    left = _MOST_DISCARDED
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    return


async def limited_body(
    request: Request, limit: int, too_large: Callable[[int | None], TooLarge]
) -> AsyncGenerator[bytes]:
    """The body as it arrives, `limit` bytes of it at most; what is over is never kept.

    Raises what `too_large` makes of the size that the client announced, or of None where it only came to light.
    """
    chunks = request.stream()
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > limit:
        if "expect" not in request.headers:  # else it has not begun: it waits for our word
            await _discard(chunks)
        raise too_large(int(said))
    read = 0
    async for chunk in chunks:
        read += len(chunk)
        if read > limit:
            await _discard(chunks)
            raise too_large(None)
        yield chunk


async def _read_body(request: Request, limit: int) -> bytes:
    def too_large(said: int | None) -> TooLarge:
        size = "is over" if said is None else f"has {said} bytes, over"
        return TooLarge(f"the body {size} {limit} bytes, the most this server takes", code="body_too_large")

    raw = bytearray()
    async for chunk in limited_body(request, limit, too_large):
        raw += chunk
    return bytes(raw)


def describe_error(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """HTTP status, body in OpenAI's shape, and headers, for any exception."""
    status, kind, param, code = 500, "server_error", None, "internal_error"
    message = "internal error; the server's log has more under this request id"
    headers: dict[str, str] = {}
    if isinstance(error, RequestError):
        status, kind, param, code, message = error.status, error.kind, error.param, error.code or "", str(error)
        if isinstance(error, Overloaded):
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if isinstance(error, TooLarge | SlowBody):
            headers["connection"] = "close"  # the rest of the body stays unread
        if status == 401:
            headers["www-authenticate"] = "Bearer"
    elif isinstance(error, EngineNotReady | EngineDead):
        dead = isinstance(error, EngineDead)
        status, code, message = 503, "engine_dead" if dead else "engine_not_ready", str(error)
        headers["retry-after"] = str(NOT_READY_RETRY_S)
    elif isinstance(error, EngineError):
        code, message = "engine_error", str(error)
    elif isinstance(error, HTTPException):
        status, kind, message = error.status_code, "invalid_request_error", error.detail
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "")
        kind = "not_found_error" if status == 404 else kind
        headers |= dict(error.headers or {})
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code or None}}, headers


def error_response(error: Exception) -> JsonResponse:
    """The answer to a request that failed before anything was sent."""
    status, body, headers = describe_error(error)
    return JsonResponse(body, status_code=status, headers=headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T], *signs: Coroutine[Any, Any, None]) -> _T:
    """Do `work` while watching the connection. Raises ClientDisconnect, with `work` cancelled, when the client goes.

    The body must have been read: from then on the one thing that can be received is the end. `signs` are other ways to
    find out that nobody is there: each ends when it is so.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(sign) for sign in (_wait_gone(receive), *signs)]
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for watch in watching:
            watch.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled():
            working.exception()  # whatever it was no longer matters to anybody


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
_PING = b": keep-alive\n\n"


class EventStream(Response):
    """Server-sent events from an iterator of bodies.

    The status is decided by the first body: an error before it is an ordinary error answer, one after it is an error
    event that ends the stream. Silence is broken by comments. Only this connection's own task ever waits for this
    reader, and not for longer than `write_timeout_s`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        bodies: AsyncGenerator[bytes],
        settings: ServeSettings,
        on_error: Callable[[Exception], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._bodies = bodies
        self._settings = settings
        self._on_error = on_error
        self._began = False
        self._spoke = False
        self._writing_since: float | None = None  # while a body waits for the reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._run(scope, receive, send), self._wait_stuck())

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async with aclosing(self._bodies) as bodies:
                async for body in bodies:
                    await self._write(send, body)
        except Exception as error:
            self._on_error(error)
            if not self._began:
                pinging.cancel()
                await error_response(error)(scope, receive, send)
                return
            _, shape, _ = describe_error(error)
            await self._write(send, sse(shape))
        finally:
            pinging.cancel()
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        await self._begin(send)
        self._spoke = True
        self._writing_since = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._writing_since = None

    async def _wait_stuck(self) -> None:
        """Return when a body has waited too long. A timer of its own for each would cost as much as the writing."""
        patience_s = wait_s = self._settings.write_timeout_s
        while wait_s > 0:
            await asyncio.sleep(wait_s)
            since = self._writing_since
            wait_s = patience_s if since is None else since + patience_s - time.monotonic()
        log.info("the reader took nothing for %g s; ending its stream", patience_s)

    async def _begin(self, send: Send) -> None:
        if not self._began:
            self._began = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _ping(self, send: Send) -> None:
        """Proxies close what is silent: a queue may be long, and a token far away."""
        while True:
            await asyncio.sleep(self._settings.keepalive_s)
            if not self._spoke:
                await self._begin(send)
                # Not timed: the next write of the stream itself ends it.
                await send({"type": "http.response.body", "body": _PING, "more_body": True})
            self._spoke = False


def plain_headers(scope: Scope) -> Mapping[str, str]:
    """The request's headers by lower-case name; the last of a repeated one."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
