"""Around every endpoint: the request id, the access log, errors in one shape, keys and their limits."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError, RequestError
from paceline.serve import logs
from paceline.serve.exchange import describe_error, error_response, plain_headers
from paceline.serve.keys import KeyRing
from paceline.serve.metrics import ServeMetrics

log = logging.getLogger("paceline.serve")
access_log = logging.getLogger("paceline.access")
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_QUIET = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds by machines


class RequestScope:
    """Outermost: gives every request an id, which goes into its logs and back in `X-Request-Id`, and logs its end."""

    def __init__(self, app: ASGIApp, metrics: ServeMetrics, paths: frozenset[str]) -> None:
        """`paths`: the known ones, for metrics."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = plain_headers(scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        token = logs.request_id.set(request_id)
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        began = time.monotonic()
        try:
            await self._answer(scope, receive, tagged, lambda: status)
        finally:
            self._log(scope, status, time.monotonic() - began)
            logs.request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, status: Callable[[], int]) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.info("the client went away")
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("a request failed")
            if status():
                raise  # too late for an answer: the server closes the connection
            code, body, _ = describe_error(error)
            self._metrics.note_error(code, body["error"]["code"] or "")
            await error_response(error)(scope, receive, send)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        known = path if path in self._paths else "/v1/models/" if path.startswith("/v1/models/") else "other"
        self._metrics.note_http(known, status or 499)
        level = logging.DEBUG if path in _QUIET else logging.INFO
        access_log.log(
            level,
            "%s %s %d",
            scope["method"],
            path[:256],
            status or 499,  # nginx's number for a client that left
            extra={"seconds": round(seconds, 4), "client": (scope.get("client") or ("",))[0]},
        )


class Gate:
    """Checks keys and their limits; holds the caller's slot until the last byte is out."""

    def __init__(self, app: ASGIApp, ring: KeyRing, metrics: ServeMetrics) -> None:
        self._app = app
        self._ring = ring
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _needs_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        with ExitStack() as held:
            try:
                caller = held.enter_context(
                    self._ring.admit(plain_headers(scope).get("authorization"), time.monotonic())
                )
            except RequestError as error:
                status, body, _ = describe_error(error)
                self._metrics.note_error(status, body["error"]["code"] or "")
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)


def _needs_key(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/tokenize", "/detokenize")
