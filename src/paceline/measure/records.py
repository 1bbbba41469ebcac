"""The plain rows of a run: what was asked, when which bytes came, what they held. No metric is computed here.

Times are seconds as floats on the **schedule's axis**: 0 is the t0 of the run's arrival schedule, taken from one
monotonic clock that all workers share. They are never wall-clock times. A run that was resumed has several segments;
each segment's t0 is placed so that scheduled times stay those of the one schedule, so the axis is the same for all.

Undefined is `None`, never 0. A simulator writes the same rows with its virtual clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

SCHEMA = 1  # of every row below; readers take unknown fields as absent


class Phase(StrEnum):
    """Warm-up rows are kept apart and never enter a metric."""

    WARMUP = "warmup"
    MEASURE = "measure"


class ErrorClass(StrEnum):
    """Why a request failed: one class each, the first thing that went wrong."""

    TIMEOUT = "timeout"  # the per-request deadline fired
    REJECTED = "rejected"  # 429 or 503
    AUTH = "auth"  # 401, 403
    NOT_FOUND = "not_found"  # 404
    HTTP_4XX = "http_4xx"  # any other 4xx, or a redirect
    HTTP_5XX = "http_5xx"  # any other 5xx
    CONNECT = "connect"  # refused, unreachable, name not found
    TLS = "tls"
    CLIENT_FD = "client_fd"  # our own file descriptors ran out: the run is INVALID
    CLIENT_PORT = "client_port"  # our own ephemeral ports ran out: the run is INVALID
    TRANSPORT = "transport"  # reset, or closed inside an HTTP message
    TRUNCATED = "truncated"  # clean end of the body before the terminal marker
    SERVER_ERROR_IN_STREAM = "server_error_in_stream"  # HTTP 200, then an error event
    SHORT = "short"  # a forced length was not delivered
    MALFORMED = "malformed"  # not HTTP, not SSE or not JSON
    CANCELLED = "cancelled"  # the run was stopped while it ran; enters no metric


class Kind:
    """One letter per row of `RequestRecord.kinds`: what an event carried. Lower case carries generated tokens."""

    CONTENT = "c"
    TEXT = "x"  # the completions endpoint
    REFUSAL = "f"
    REASONING = "r"
    TOOL = "t"
    MULTI = "m"  # more than one channel in one delta, one of them visible
    GROWN = "g"  # no text (half a character, say), but running usage.completion_tokens grew
    ROLE = "R"  # role only, or an empty delta
    FINISH = "F"  # finish_reason without text
    USAGE = "U"
    ERROR = "E"
    DONE = "D"  # data: [DONE]
    BODY = "B"  # a whole non-streaming body
    OTHER = "O"  # vendor events and whatever we do not know: ignored

    TOKENS = frozenset("cxfrtmg")  # kinds that carry a generated token
    VISIBLE = frozenset("cxfm")  # kinds that a user would see


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts as the server told them. Details are parts of the totals, never added to them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, served from a prefix cache
    reasoning_tokens: int | None = None  # of the completion


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One earlier try of a request that was tried again. The last try is the record itself."""

    dispatched_s: float
    ended_s: float
    error: ErrorClass
    status: int | None = None
    retry_after_s: float | None = None  # what the server asked for
    waited_s: float = 0.0  # what we then waited


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything one request saw. One JSON line; written once, when the request has ended.

    Order of times: scheduled <= dispatched <= (connected) <= written <= headers <= reads <= closed. `scheduled_s` is
    the zero of every latency: the place on the arrival schedule, in a closed loop the moment its slot asked for it,
    in a conversation the intended end of the previous turn plus think time.

    Two parallel tables. Reads: `read_s[j]`, `read_bytes[j]` (body bytes as they left the socket, stamped before any
    parsing). Rows: one per (event, choice); row i came complete with read `row_reads[i]`, so its time is
    `read_s[row_reads[i]]`, is `kinds[i]`, and added `row_chars[i]` characters. `text` is the concatenation of all
    rows' characters in order, so a row's own text is a slice of it. A row is stamped with the read that held the last
    byte of its data, also when the blank line after it came later.
    """

    id: str
    index: int  # place in the schedule; conversations: of the conversation
    phase: Phase = Phase.MEASURE
    segment: int = 0
    worker: int = 0
    turn: int = 0  # of a conversation, from 0
    turns: int = 1
    tenant: str = ""
    traffic_class: str = ""
    prefix_group: str = ""  # requests of one group share a prompt prefix
    first_wave: bool = False  # closed loop: the first request of its slot, started together with the others

    # What was asked
    stream: bool = True
    prompt_tokens_wanted: int | None = None  # in the server's tokens
    output_tokens_wanted: int | None = None  # max_tokens
    length_forced: bool = False  # ignore_eos: fewer tokens than wanted is a failure
    prompt_chars: int = 0

    # When
    scheduled_s: float
    dispatched_s: float | None = None  # first attempt; None: it never left
    cap_wait_s: float = 0.0  # of dispatched - scheduled, the part spent waiting below the concurrency cap
    connected_s: float | None = None  # a connection was opened for it then; None: an open one was used
    written_s: float | None = None  # last attempt: the request handed to the socket
    headers_s: float | None = None  # the read that completed the response head
    closed_s: float | None = None  # end of the response (or of the failure)

    # What came
    status: int | None = None
    error: ErrorClass | None = None  # None: success
    error_message: str = ""  # at most 300 characters, keys removed
    finish_reason: str | None = None  # of choice 0
    done_seen: bool = False  # data: [DONE]
    usage: Usage | None = None
    client_tokens: int | None = None  # by the manifest's named tokenizer, only where usage is missing
    server_request_id: str = ""
    attempts: tuple[Attempt, ...] = ()  # earlier tries, oldest first

    read_s: tuple[float, ...] = ()
    read_bytes: tuple[int, ...] = ()
    kinds: str = ""  # one letter a row, see Kind
    row_reads: tuple[int, ...] = ()
    row_chars: tuple[int, ...] = ()
    row_tokens: tuple[
        int | None, ...
    ] = ()  # tokens of the row by running usage, token ids or logprobs; (): all unknown
    row_events: tuple[int, ...] = ()  # ordinal of the SSE event; (): row i is event i
    row_choices: tuple[int, ...] = ()  # (): all of choice 0
    text: str | None = None  # None: not kept
    comments: int = 0  # SSE comment lines (keep-alives)

    @property
    def ok(self) -> bool:
        """2xx, no error event, terminal marker seen and, where forced, the length delivered."""
        return self.error is None

    @property
    def sent(self) -> bool:
        """It was let out to the server. What the end of the run cut off before that was never sent."""
        return self.dispatched_s is not None

    def row_s(self, i: int) -> float:
        """Arrival time of row i."""
        return self.read_s[self.row_reads[i]]

    def tokens_of(self, i: int) -> int | None:
        """Tokens of row i as the server told; None: it did not tell."""
        return self.row_tokens[i] if self.row_tokens else None

    def choice_of(self, i: int) -> int:
        return self.row_choices[i] if self.row_choices else 0

    def token_rows(self, choice: int | None = None) -> list[int]:
        """Rows that carry generated tokens, in order of arrival; of one choice or of all."""
        return [
            i for i, k in enumerate(self.kinds) if k in Kind.TOKENS and (choice is None or self.choice_of(i) == choice)
        ]


class Recount(msgspec.Struct, frozen=True):
    """Output tokens of one request by the client's tokenizer, counted after the run, off its clock."""

    id: str
    tokens: int


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one worker process felt, a few times a second. Counters are since the segment's start."""

    segment: int
    worker: int
    t_s: float
    in_flight: int
    waiting: int = 0  # held back by the concurrency cap
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0  # token-carrying rows seen
    lags_s: tuple[float, ...] = ()  # how late the event loop woke each tick of this interval: raw, to be pooled
    late_s: tuple[float, ...] = ()  # dispatch minus due time of each request sent in this interval, cap's wait excluded
    cpu_s: float = 0.0  # the process's CPU time so far


class ScrapeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of the server's /metrics, mapped to our names (scrape.py lists them)."""

    t_s: float  # middle of the request
    took_s: float = 0.0
    segment: int = 0
    values: dict[str, float] = msgspec.field(default_factory=dict)  # counters and gauges by canonical name
    histograms: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # name -> {le: cumulative count}
    error: str = ""


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One uninterrupted stretch of load. A resumed run has several."""

    index: int
    t0_ns: int  # the monotonic clock at the axis' zero
    t0_wall: str  # ISO 8601 with zone, for people and for joining logs only
    first_s: float = 0.0  # first scheduled time of this segment
    ended: str = ""  # "complete" | "interrupted" | "failed: why" | "" (running, or crashed)
    ended_s: float | None = None


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The client's own error, measured against the exact mock at the planned load. Milliseconds."""

    streams: int
    tokens_per_s: float  # of each stream
    workers: int
    requests: int
    ttft_error_p50_ms: float | None = None
    ttft_error_p99_ms: float | None = None
    itl_error_p50_ms: float | None = None
    itl_error_p99_ms: float | None = None
    late_p99_ms: float | None = None
    lag_p99_ms: float | None = None
    mock_late_p99_ms: float | None = None  # how late the mock itself was; part of the errors above
    cpu: float | None = None  # share of one core that the busiest worker used
    ok: bool = False
    why: str = ""


class TokenFit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How prompt lengths were made right in the server's tokens."""

    method: str  # "tokenize" | "usage" | "none"
    overhead_tokens: int = 0  # what the chat template adds to a prompt
    tokens_per_word: float = 1.0
    checked: int = 0  # requests whose usage was compared, filled in after the run
    mismatched: int = 0  # of those, off by more than 1 % (and more than one token)
    worst: float | None = None  # the largest relative difference
    note: str = ""


class Manifest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a run is and how to run it again. The one mutable row: rewritten whole, atomically, never appended."""

    schema: int = SCHEMA
    run_id: str
    kind: str = "real"  # or "simulated"
    created: str  # ISO 8601 with zone
    plan: dict[str, Any]  # BenchPlan as it was resolved; keys are never in it
    seed: int
    command: list[str] = []
    requests_planned: int = 0
    conversations_planned: int = 0
    duration_planned_s: float | None = None
    schedule_sha256: str = ""
    target: dict[str, Any] = {}  # url, endpoint, model, quantization, engine, engine_version as far as the server tells
    client: dict[str, Any] = {}  # paceline, python, platform, cpu, memory, packages, clock, limits, event loop
    segments: list[Segment] = []
    self_check: SelfCheck | None = None
    token_fit: TokenFit | None = None
    client_tokenizer: str | None = None
    warnings: list[str] = []  # in words, for the report
    parent: str | None = None  # run folder or id this one reruns, or the sweep it belongs to
    labels: dict[str, str] = {}  # free: arm, pair, point of a sweep
    # Of a simulation: what the engines' time went into (`usage`, by engine), and what else is known of their inside.
    engine: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        return bool(self.segments) and self.segments[-1].ended == "complete"
