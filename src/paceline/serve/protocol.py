"""uvicorn's HTTP/1.1 protocol, bounded before the body and with our shape of error.

uvicorn takes heads of any size, waits for them for ever, and answers what is no HTTP in plain text. The limits of a
body are in `exchange`, where it is read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.errors import BadRequest, RequestError
from paceline.serve.exchange import describe_error, encode_json
from paceline.serve.outbox import GatheringTransport, Outbox

log = logging.getLogger("paceline.serve")
_PER_HEADER = 4  # bytes of ": " and the line's end


class HeadTooLarge(RequestError):
    """431: request line and headers are over the limit."""

    status = 431


class SlowHead(RequestError):
    """408: request line and headers did not arrive in time."""

    status = 408


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head has `max_head_bytes` and `head_timeout_s` from its first byte, the first from connecting.

    The same timer ends a connection that goes on sending a body after its answer is out.
    """

    def __init__(self, *args: Any, max_head_bytes: int, head_timeout_s: float, outbox: Outbox, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outbox = outbox
        self._max_head_bytes = max_head_bytes
        self._head_timeout_s = head_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._parsed = 0  # bytes of the current head that the parser has handed over
        self._pending = 0  # bytes that came since it last handed over a part: they lie in the parser's buffers
        self._fault: RequestError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(GatheringTransport(transport, self._outbox, self.loop))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self.transport.is_closing() or not self._awaits_head:
            return
        if self._parsed + self._pending > self._max_head_bytes:
            self._refuse(self._too_large())
        elif self._timer is None and self.timeout_keep_alive_task is None:
            self._arm()

    @property
    def _awaits_head(self) -> bool:
        """No request is under way; what comes now is a head, or what is left of a body that nobody wants."""
        return self.cycle is None or bool(self.cycle.response_complete)

    # The parser's callbacks. What they raise ends in `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._parsed = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._grow(len(name) + len(value) + _PER_HEADER)

    def on_headers_complete(self) -> None:
        self._pending = 0
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def _grow(self, size: int) -> None:
        self._pending = 0
        self._parsed += size
        if self._parsed > self._max_head_bytes:
            self._fault = self._too_large()
            raise self._fault

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        self._refuse(self._fault or BadRequest("this is no valid HTTP/1.1 request", code="invalid_http"))

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"request line and headers are over {self._max_head_bytes} bytes", code="head_too_large")

    def _refuse(self, error: RequestError) -> None:
        self._disarm()
        if not self._awaits_head:  # an answer is on its way: whatever stood in it would be taken for a part of it
            self.transport.close()
            return
        status, shape, _ = describe_error(error)
        request_id = f"req-{secrets.token_hex(12)}"
        log.info("a connection was refused: %s", error, extra={"status": status, "refused_id": request_id})
        body = encode_json(shape)
        self.transport.write(
            b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\nx-request-id: %s\r\n\r\n%s"
            % (STATUS_LINE[status], len(body), request_id.encode(), body)
        )
        self.transport.close()

    # Time.

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self._head_timeout_s, self._too_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            late = f"request line and headers did not arrive within {self._head_timeout_s:g} s"
            self._refuse(SlowHead(late, code="head_too_slow"))
