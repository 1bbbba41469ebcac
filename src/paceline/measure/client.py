"""Sends requests to one endpoint and records what came back. Callbacks, no task per request.

A request is submitted at its due time. From there on everything that delays it is inside its latency: the wait below
the concurrency cap, opening a connection, rejected attempts and the waits they asked for.
"""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.measure.alarm import Alarm, clock
from paceline.measure.protocol import Connection, Turn, classify
from paceline.measure.records import Attempt, ErrorClass, Kind, RequestRecord
from paceline.measure.transcript import Transcript

MESSAGE_LIMIT = 300
ERROR_BODY_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `addresses` were resolved before the start, so no lookup is ever inside a latency."""

    host: str
    port: int
    addresses: tuple[str, ...]
    tls: ssl.SSLContext | None = None
    # Request line and headers up to and without the value of Content-Length, which comes last.
    head: bytes = field(default=b"", repr=False)
    heads: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # tenant -> its own, with its own key
    secrets: tuple[str, ...] = field(default=(), repr=False)  # removed from every message


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How patient the client is. Seconds."""

    timeout_s: float = 600.0  # from the first dispatch to the end of the last attempt
    max_concurrency: int | None = None
    retries: int = 0  # of 429 and 503
    retry_cap_s: float = 60.0  # never wait longer than this for one retry, whatever Retry-After says
    connect_timeout_s: float = 10.0
    keep_text: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """One request ready to go."""

    scheduled_s: float
    body: bytes | memoryview
    labels: dict[str, Any]  # fields of its RequestRecord: id, index, phase, what was wanted
    stream: bool = True
    choices: int = 1
    forced: int | None = None  # the output length the server was told to deliver


class Client:
    """One event loop's connections to one endpoint. `t0` is the axis' zero on the clock."""

    def __init__(self, endpoint: Endpoint, settings: ClientSettings, alarm: Alarm, *, t0: float = 0.0) -> None:
        self.t0 = t0
        self.settings = settings
        self.in_flight = 0
        self.sent = self.done = self.failed = self.tokens = 0
        self.opened = 0  # connections, ever
        self.late: list[float] = []  # dispatch minus due time since the last take_late
        self.alarm = alarm
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._turn = Turn(self._loop)
        self._idle: list[Connection] = []  # last in, first out: the warm ones are used
        self._waiting: deque[_Request] = deque()
        self._live: dict[_Request, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Requests held back by the concurrency cap."""
        return len(self._waiting)

    def take_late(self) -> list[float]:
        late, self.late = self.late, []
        return late

    async def open(self, count: int) -> None:
        """Open connections before the start. Raises OSError or ssl.SSLError when the first ones cannot be."""
        for start in range(0, count, 64):
            batch = min(64, count - start)
            self._idle += await asyncio.gather(*(self.connect() for _ in range(batch)))

    async def connect(self) -> Connection:
        """A new connection to the first address that answers."""
        last: BaseException = OSError("no address")
        for address in self._endpoint.addresses:
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    _, connection = await self._loop.create_connection(
                        lambda: Connection(self._turn),
                        address,
                        self._endpoint.port,
                        ssl=self._endpoint.tls,
                        server_hostname=self._endpoint.host if self._endpoint.tls else None,
                    )
            except (OSError, ssl.SSLError, TimeoutError) as error:
                last = TimeoutError("connecting timed out") if isinstance(error, TimeoutError) else error
            else:
                self.opened += 1
                return connection
        raise last

    def submit(self, job: Job, on_done: Callable[[RequestRecord], None]) -> None:
        """Take a request whose time has come. `on_done` gets its record, exactly once, unless it was never sent."""
        request = _Request(self, job, on_done)
        now = clock()
        self.late.append(now - self.t0 - job.scheduled_s)
        cap = self.settings.max_concurrency
        if cap is not None and self.in_flight >= cap:
            request.held_since = now
            self._waiting.append(request)
        else:
            self._start(request)

    def _start(self, request: _Request) -> None:
        self.in_flight += 1
        self.sent += 1
        self._live[request] = None
        request.start()

    def give_connection(self, request: _Request) -> None:
        """Attempt `request` on an idle connection, else on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                request.attempt(connection)
                return
        task = self._loop.create_task(self._connect_for(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_for(self, request: _Request) -> None:
        try:
            connection = await self.connect()
        except (OSError, ssl.SSLError) as error:
            request.failed(*classify(error), clock())
            return
        if request.over:
            self.release(connection)
        else:
            request.connected = clock()
            request.attempt(connection)

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, if it can be used again."""
        if not connection.closed:
            self._idle.append(connection)

    def forget(self, request: _Request, record: RequestRecord) -> None:
        """A request ended: its slot under the cap goes to the one that waited longest."""
        del self._live[request]
        self.in_flight -= 1
        self.done += 1
        self.failed += record.error is not None
        if self._waiting and (self.settings.max_concurrency is None or self.in_flight < self.settings.max_concurrency):
            self._start(self._waiting.popleft())

    def message(self, text: str) -> str:
        """A message fit for a record: short, one line, no key in it."""
        for secret in self._endpoint.secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())[:MESSAGE_LIMIT]

    def request_head(self, tenant: str, body_length: int) -> bytes:
        return b"%b%d\r\n\r\n" % (self._endpoint.heads.get(tenant, self._endpoint.head), body_length)

    def stop(self) -> None:
        """End everything now: what waits was never sent, what runs is recorded as cancelled."""
        self._waiting.clear()
        for request in list(self._live):
            request.failed(ErrorClass.CANCELLED, "the run was stopped", clock())

    async def close(self) -> None:
        self.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)


class _Request:
    """The life of one user request over all its attempts. Implements protocol.Exchange."""

    def __init__(self, client: Client, job: Job, on_done: Callable[[RequestRecord], None]) -> None:
        self.job = job
        self.over = False
        self.held_since: float | None = None
        self.connected: float | None = None
        self._client = client
        self._on_done = on_done
        self._tenant: str = job.labels.get("tenant", "")
        self._dispatched = 0.0
        self._cap_wait = 0.0
        self._attempts: list[Attempt] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        """Before each attempt."""
        self._connection: Connection | None = None
        self._began = clock()
        self._written: float | None = None
        self._status: int | None = None
        self._headers: dict[str, str] = {}
        self._head_at: float | None = None
        self._read_s: list[float] = []
        self._read_bytes: list[int] = []
        self._transcript: Transcript | None = None
        self._error_body = bytearray()

    def start(self) -> None:
        now = clock()
        self._dispatched = now
        if self.held_since is not None:
            self._cap_wait = now - self.held_since
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._client.settings.timeout_s, self._expire)
        self._client.give_connection(self)

    def attempt(self, connection: Connection) -> None:
        self._connection = connection
        body = self.job.body
        self._written = connection.send(self, self._client.request_head(self._tenant, len(body)), body)

    # protocol.Exchange

    def head(self, status: int, headers: dict[str, str], now: float) -> None:
        self._status, self._headers, self._head_at = status, headers, now
        if 200 <= status < 300:
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            streaming = kind == "text/event-stream" or (self.job.stream and kind != "application/json")
            self._transcript = Transcript(streaming=streaming, keep_text=self._client.settings.keep_text)

    def body(self, data: bytes, now: float, wire_bytes: int, new_read: bool) -> None:
        if self._transcript is None:
            if len(self._error_body) < ERROR_BODY_LIMIT:
                self._error_body += data
            return
        if new_read:
            self._read_s.append(now)
            self._read_bytes.append(wire_bytes)
        self._transcript.feed(data, len(self._read_s) - 1)

    def ended(self, now: float, clean: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.release(connection)
        status, transcript = self._status, self._transcript
        if transcript is None:
            assert status is not None
            error = class_of_status(status)
            if error is ErrorClass.REJECTED and self._retry(now):
                return
            self._finish(error, f"HTTP {status}: {self._error_text()}", now)
            return
        transcript.finish()
        cause, message = transcript.verdict(choices=self.job.choices, forced=self.job.forced)
        if cause is ErrorClass.MALFORMED and not clean and not transcript.streaming:
            cause, message = ErrorClass.TRUNCATED, "the server closed the connection inside the body"
        self._finish(cause, message, now)

    def failed(self, error: ErrorClass, message: str, now: float) -> None:
        if self.over:
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            # A kept-alive connection that the server had closed already says nothing about this request.
            stale = error is ErrorClass.TRANSPORT and connection.uses > 1 and self._head_at is None
            connection.abort()
            if stale:
                self._client.give_connection(self)
                return
        self._finish(error, message, now)

    # Ends

    def _expire(self) -> None:
        self.failed(ErrorClass.TIMEOUT, f"no end within {self._client.settings.timeout_s:g} s", clock())

    def _retry(self, now: float) -> bool:
        """Arrange another attempt after a rejection, if one is left."""
        settings = self._client.settings
        if len(self._attempts) >= settings.retries:
            return False
        asked = retry_after_s(self._headers)
        wait = min(asked if asked is not None else 0.5 * 2 ** len(self._attempts), settings.retry_cap_s)
        t0 = self._client.t0
        self._attempts.append(
            Attempt(
                dispatched_s=round(self._began - t0, 7),
                ended_s=round(now - t0, 7),
                error=ErrorClass.REJECTED,
                status=self._status,
                retry_after_s=asked,
                waited_s=wait,
            )
        )
        self._client.alarm.at(now + wait, self._again)
        return True

    def _again(self) -> None:
        if not self.over:
            self._reset()
            self._client.give_connection(self)

    def _error_text(self) -> str:
        text = bytes(self._error_body).decode("utf-8", "replace")
        try:
            payload = msgspec.json.decode(text)
            error = payload.get("error", payload) if isinstance(payload, dict) else payload
            return str(error.get("message", error) if isinstance(error, dict) else error)
        except msgspec.DecodeError:
            return text

    def _finish(self, error: ErrorClass | None, message: str, now: float) -> None:
        self.over = True
        if self._deadline is not None:
            self._deadline.cancel()
        record = self._record(error, message, now)
        self._client.forget(self, record)
        self._on_done(record)

    def _record(self, error: ErrorClass | None, message: str, now: float) -> RequestRecord:
        t0, job = self._client.t0, self.job
        columns: dict[str, Any] = {}
        if self._transcript is not None:
            columns = self._transcript.columns()
            self._client.tokens += sum(k in Kind.TOKENS for k in columns["kinds"])
        return RequestRecord(
            **job.labels,
            stream=job.stream,
            scheduled_s=round(job.scheduled_s, 7),
            dispatched_s=_on_axis(self._dispatched, t0),
            cap_wait_s=round(self._cap_wait, 7),
            connected_s=_on_axis(self.connected, t0),
            written_s=_on_axis(self._written, t0),
            headers_s=_on_axis(self._head_at, t0),
            closed_s=_on_axis(now, t0),
            status=self._status,
            error=error,
            error_message=self._client.message(message),
            attempts=tuple(self._attempts),
            read_s=tuple([round(t - t0, 7) for t in self._read_s]),
            read_bytes=tuple(self._read_bytes),
            **columns,
        )


def _on_axis(moment: float | None, t0: float) -> float | None:
    return None if moment is None else round(moment - t0, 7)


def class_of_status(status: int) -> ErrorClass:
    """The error class of a status outside 2xx."""
    if status in (429, 503):
        return ErrorClass.REJECTED
    if status in (401, 403):
        return ErrorClass.AUTH
    if status == 404:
        return ErrorClass.NOT_FOUND
    return ErrorClass.HTTP_5XX if status >= 500 else ErrorClass.HTTP_4XX


def retry_after_s(headers: dict[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date measured against the server's own Date."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        return max(0.0, float(value)) if float(value) < float("inf") else None
    except ValueError:
        pass
    try:
        until = email.utils.parsedate_to_datetime(value).timestamp()
        since = email.utils.parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
    except (ValueError, TypeError):
        return None
    return max(0.0, until - since)
