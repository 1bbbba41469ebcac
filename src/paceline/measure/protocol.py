"""HTTP/1.1 on a bare asyncio protocol: every read is stamped before a byte of it is looked at.

`data_received` only stamps and queues. One callback per turn of the event loop, after all sockets that were ready have
been read, then parses what the whole turn brought. So the stamp of one stream never waits for the parsing of another.
Over TLS a stamp is taken when the bytes are decrypted, which is when they leave the event loop's socket layer.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import zlib
from typing import Any, Protocol, cast

import httptools

from paceline.measure.alarm import clock
from paceline.measure.records import ErrorClass


class Exchange(Protocol):
    """Who takes a response. Exactly one of `ended` and `failed` is called, once, last."""

    def head(self, status: int, headers: dict[str, str], now: float) -> None:
        """Status line and headers (names in lower case) are complete."""

    def body(self, data: bytes, now: float, wire_bytes: int, new_read: bool) -> None:
        """Decoded body bytes. `new_read` is false for a further piece of the same network read."""

    def ended(self, now: float, clean: bool) -> None:
        """The response is over; not `clean`: the peer closed inside its HTTP framing, with a FIN."""

    def failed(self, error: ErrorClass, message: str, now: float) -> None:
        """The connection or the protocol broke."""


class Turn:
    """Parses, once per turn of the loop, what the turn's reads brought."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Connection] = []

    def add(self, connection: Connection) -> None:
        if not self._waiting:
            self._loop.call_soon(self._run)
        self._waiting.append(connection)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.parse()


class Connection(asyncio.Protocol):
    """One kept-alive connection, at most one exchange at a time."""

    def __init__(self, turn: Turn) -> None:
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.uses = 0
        self.closed = False  # no further exchange can start
        self._turn = turn
        # What came: (stamp, bytes), or (stamp, None) for a FIN, or (stamp, exception) for a broken connection.
        self._inbox: list[tuple[float, bytes | Exception | None]] = []
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._status = 0
        self._head_done = False
        self._framed = False  # the length of the body is told, by chunks or by a number
        self._complete = False
        self._keep = False
        self._inflate: Any = None
        self._now = 0.0
        self._read_bytes = 0
        self._first_piece = True

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = clock()
        if not self._inbox:
            self._turn.add(self)
        self._inbox.append((now, data))

    def eof_received(self) -> bool:
        self._put(None)
        return False  # close our side too

    def connection_lost(self, exc: Exception | None) -> None:
        self._put(exc)

    def _put(self, what: Exception | None) -> None:
        now = clock()
        self.closed = True
        if not self._inbox:
            self._turn.add(self)
        self._inbox.append((now, what))

    # From the client

    def send(self, exchange: Exchange, head: bytes, body: bytes | memoryview) -> float:
        """Start an exchange and return when the request was handed to the socket."""
        assert self.transport is not None
        assert self.exchange is None
        self._reset()
        self.exchange = exchange
        self.uses += 1
        self.transport.writelines((head, body)) if body else self.transport.write(head)
        return clock()

    def abort(self) -> None:
        """Drop the connection and whatever runs on it; nobody is told."""
        self.closed = True
        self.exchange = None
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    # Parsing, once a turn

    def parse(self) -> None:
        inbox, self._inbox = self._inbox, []
        for now, data in inbox:
            if self.exchange is None:
                # Bytes nobody asked for, or the end of an idle connection.
                if isinstance(data, bytes):
                    self.close()
                continue
            self._now = now
            if isinstance(data, bytes):
                self._feed(data)
            else:
                self._over(data)

    def _feed(self, data: bytes) -> None:
        self._read_bytes, self._first_piece = len(data), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ErrorClass.MALFORMED, "the server tried to switch protocols")
        except (httptools.HttpParserError, zlib.error) as error:
            if not self._complete:  # junk after a complete response harms the connection only
                self._fail(ErrorClass.MALFORMED, f"not an HTTP response: {error.__context__ or error}")
            self.close()
        if self._complete and self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            if not self._keep or self.closed:
                self.close()
            exchange.ended(self._now, clean=True)

    def _over(self, error: Exception | None) -> None:
        """The peer closed (None) or the connection broke while an exchange ran."""
        exchange = self.exchange
        assert exchange is not None
        if error is None and self._head_done:
            self.exchange = None
            # Without a told length, the end of the connection is the end of the body.
            exchange.ended(self._now, clean=not self._framed)
        elif error is None:
            self._fail(ErrorClass.TRANSPORT, "the server closed the connection before it answered")
        else:
            self._fail(*classify(error))

    def _fail(self, error: ErrorClass, message: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.abort()
        if exchange is not None:
            exchange.failed(error, message, self._now)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if 100 <= self._status < 200:
            return
        self._head_done = True
        self._framed = "chunked" in self._headers.get("transfer-encoding", "") or "content-length" in self._headers
        encoding = self._headers.get("content-encoding", "identity").lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
        elif encoding not in ("identity", ""):
            raise ValueError(f"content-encoding {encoding} was not asked for")
        assert self.exchange is not None
        self.exchange.head(self._status, self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        if self._inflate is not None:
            data = self._inflate.decompress(data)
        if self.exchange is not None:
            self.exchange.body(data, self._now, self._read_bytes, self._first_piece)
            self._first_piece = False

    def on_message_complete(self) -> None:
        if 100 <= self._status < 200:
            self._headers = {}  # an interim answer; the real one follows
            return
        self._complete = True
        self._keep = self._parser.should_keep_alive()  # known here only: the parser then forgets the message


def classify(error: BaseException) -> tuple[ErrorClass, str]:
    """(class, message) of what connecting or the connection raised."""
    if isinstance(error, ssl.SSLError | ssl.CertificateError):
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
        return ErrorClass.TLS, f"TLS: {reason}"
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return ErrorClass.CLIENT_FD, "out of file descriptors on the client"
        if error.errno == errno.EADDRNOTAVAIL:
            return ErrorClass.CLIENT_PORT, "out of ephemeral ports on the client"
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
            return ErrorClass.TRANSPORT, "connection reset by the server"
        return ErrorClass.CONNECT, error.strerror or str(error) or type(error).__name__
    return ErrorClass.TRANSPORT, f"{type(error).__name__}: {error}"
