"""What one request's user felt, computed from its record exactly as `docs/measuring.md` defines it.

    response = from the scheduled time (what gates use)      service = from the last send (what the server did)

    t=0 scheduled   dispatched/written      first token        last token   close
    |-- queue delay --|------ ttft (service) ----|-- gaps: icl, itl --|-------|
    |------------- ttft (response) --------------|

`None` is undefined: it enters no statistic, is counted beside every one, and passes no gate. Only successful requests
have latencies; what a failed one delivered before it failed stays in its record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.measure.records import ErrorClass, Kind, RequestRecord
from paceline.measure.stats import percentile

# How a read of k tokens enters ITL. k - 1 zeros would hide every stall behind tokens that nobody saw earlier.
ITL_RULE = "the gap before a read that carries k tokens of one choice enters as gap / k, k times"


class TokenSource(StrEnum):
    """Who counted the output tokens."""

    USAGE = "server usage"
    STREAM = "server, per event"  # token ids, logprobs or running usage, with no final usage
    CLIENT = "client tokenizer"  # the manifest names it
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gap:
    """The wait before one read that carried `tokens` tokens of a choice. `at_s` is on the schedule's axis."""

    at_s: float
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request's numbers, in seconds. See the module's picture."""

    record: RequestRecord
    queue_delay_s: float | None = None  # dispatched - scheduled: lateness, and the wait below a concurrency cap
    ttft_s: float | None = None
    ttft_service_s: float | None = None
    first_visible_s: float | None = None  # response
    icl_s: tuple[float, ...] = ()  # between token-carrying events of one choice; 0 for two in one read
    gaps: tuple[Gap, ...] = ()  # between token-carrying reads: what ITL and stalls are made of
    tpot_s: float | None = None
    e2e_s: float | None = None  # response, to the last token
    e2e_service_s: float | None = None
    close_s: float | None = None  # response, to the end of the response
    max_stall_s: float | None = None
    output_tokens: int | None = None
    token_source: TokenSource = TokenSource.UNKNOWN
    tokens_estimated: bool = False  # tokens per event were shared out by characters, not told by the server
    too_short: bool = False  # fewer than two output tokens: gaps and TPOT have no meaning (not: are unknown)

    @property
    def ok(self) -> bool:
        return self.record.ok

    @property
    def itl_s(self) -> list[float]:
        """Gap per token under `ITL_RULE`."""
        return [gap.seconds / gap.tokens for gap in self.gaps for _ in range(gap.tokens)]

    @property
    def icl_read_s(self) -> list[float]:
        """Gap between two token-carrying reads, however many events each held."""
        return [gap.seconds for gap in self.gaps]

    @property
    def input_tokens(self) -> int | None:
        return self.record.usage.prompt_tokens if self.record.usage else None

    @property
    def cached_tokens(self) -> int | None:
        return self.record.usage.cached_tokens if self.record.usage else None


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The records that metrics speak about: sent, and not cut off by the end of the run."""
    return [record for record in records if record.sent and record.error is not ErrorClass.CANCELLED]


def measure(record: RequestRecord) -> RequestMetrics:
    """All per-request metrics of one record."""
    zero = record.scheduled_s
    queue = None if record.dispatched_s is None else record.dispatched_s - zero
    total, source = output_tokens(record)
    if not record.ok:
        return RequestMetrics(record, queue_delay_s=queue, output_tokens=total, token_source=source)
    sent = record.written_s if record.written_s is not None else record.dispatched_s
    close = None if record.closed_s is None else record.closed_s - zero
    rows = record.token_rows()
    if not rows:
        whole = record.kinds.rfind(Kind.BODY)  # a body that was not streamed: its tokens came when it came
        last = record.row_s(whole) if whole >= 0 else None
        return RequestMetrics(
            record,
            queue_delay_s=queue,
            e2e_s=None if last is None else last - zero,
            e2e_service_s=None if last is None or sent is None else last - sent,
            close_s=close,
            output_tokens=total,
            token_source=source,
            # A body's tokens came all at once, and there may be many: its TPOT is unknown, not inapplicable.
            too_short=whole < 0 or (total is not None and total < 2),
        )
    tokens, estimated = tokens_per_row(record, rows, total)
    first, last = record.row_s(rows[0]), record.row_s(rows[-1])
    visible = next((record.row_s(i) for i in rows if record.kinds[i] in Kind.VISIBLE), None)
    gaps = _gaps(record, rows, tokens)
    return RequestMetrics(
        record,
        queue_delay_s=queue,
        ttft_s=first - zero,
        ttft_service_s=None if sent is None else first - sent,
        first_visible_s=None if visible is None else visible - zero,
        icl_s=_event_gaps(record, rows),
        gaps=gaps,
        tpot_s=_tpot(record, rows, tokens, total),
        e2e_s=last - zero,
        e2e_service_s=None if sent is None else last - sent,
        close_s=close,
        max_stall_s=max((gap.seconds for gap in gaps), default=None),
        output_tokens=total,
        token_source=source,
        tokens_estimated=estimated,
        too_short=(len(rows) if total is None else total) < 2,
    )


def output_tokens(record: RequestRecord) -> tuple[int | None, TokenSource]:
    """Output tokens and who counted them: the server's usage, its per-event counts, the named tokenizer, nobody."""
    if record.usage is not None and record.usage.completion_tokens is not None:
        return record.usage.completion_tokens, TokenSource.USAGE
    told = [record.tokens_of(i) for i in record.token_rows()]
    if told and all(count is not None for count in told):
        return sum(count for count in told if count is not None), TokenSource.STREAM
    if record.client_tokens is not None:
        return record.client_tokens, TokenSource.CLIENT
    return None, TokenSource.UNKNOWN


def tokens_per_row(record: RequestRecord, rows: Sequence[int], total: int | None) -> tuple[list[int], bool]:
    """Tokens of each token-carrying row (at least one each), and whether some had to be estimated.

    What the server told for a row stands. What is left of the total goes to the other rows, one each and the rest in
    proportion to their characters (largest remainders first).
    """
    told = [record.tokens_of(i) for i in rows]
    # A row that carries text but, by running usage, no new token (half a word, flushed late) still is an event.
    counts = [1 if count is None else max(count, 1) for count in told]
    open_rows = [j for j, count in enumerate(told) if count is None]
    if not open_rows or total is None:
        return counts, bool(open_rows) and total is None
    spare = total - sum(counts)
    if spare <= 0:
        return counts, spare < 0
    sizes = [max(record.row_chars[rows[j]], 1) for j in open_rows]
    shares = _largest_remainders(spare + len(open_rows), sizes)
    for j, share in zip(open_rows, shares, strict=True):
        counts[j] = share
    return counts, True


def _largest_remainders(total: int, sizes: Sequence[int]) -> list[int]:
    """Integers that sum to `total`, at least one each, as near to proportional to `sizes` as can be."""
    weight = sum(sizes)
    exact = [total * size / weight for size in sizes]
    shares = [max(1, math.floor(value)) for value in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda j: (shares[j] - exact[j], j))
    missing = total - sum(shares)
    for j in by_remainder[: max(missing, 0)]:
        shares[j] += 1
    while missing < 0:  # the floor of one token each took too many: the largest give back
        largest = max(range(len(shares)), key=lambda j: (shares[j], -j))
        shares[largest] -= 1
        missing += 1
    return shares


def _by_choice(record: RequestRecord, rows: Sequence[int]) -> dict[int, list[int]]:
    """Positions in `rows`, by choice: with n > 1 each choice is a stream of its own to whoever reads it."""
    choices: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        choices.setdefault(record.choice_of(row), []).append(position)
    return choices


def _event_gaps(record: RequestRecord, rows: Sequence[int]) -> tuple[float, ...]:
    gaps: list[float] = []
    for positions in _by_choice(record, rows).values():
        times = [record.row_s(rows[p]) for p in positions]
        gaps.extend(b - a for a, b in itertools.pairwise(times))
    return tuple(gaps)


def _gaps(record: RequestRecord, rows: Sequence[int], tokens: Sequence[int]) -> tuple[Gap, ...]:
    gaps: list[Gap] = []
    for positions in _by_choice(record, rows).values():
        arrivals: list[tuple[float, int]] = []  # (time, tokens of this choice that came then)
        for p in positions:
            when = record.row_s(rows[p])
            if arrivals and arrivals[-1][0] == when:
                arrivals[-1] = (when, arrivals[-1][1] + tokens[p])
            else:
                arrivals.append((when, tokens[p]))
        gaps.extend(Gap(when, when - before, count) for (before, _), (when, count) in itertools.pairwise(arrivals))
    return tuple(gaps)


def _tpot(record: RequestRecord, rows: Sequence[int], tokens: Sequence[int], total: int | None) -> float | None:
    """(t_last - t_first) / (N - n_first), n_first being all tokens that had arrived at t_first; pooled over choices."""
    if total is None:
        return None
    span, first_tokens = 0.0, 0
    for positions in _by_choice(record, rows).values():
        times = [record.row_s(rows[p]) for p in positions]
        span += times[-1] - times[0]
        first_tokens += sum(tokens[p] for p, when in zip(positions, times, strict=True) if when == times[0])
    return None if total - first_tokens < 1 else span / (total - first_tokens)


# What a gate, an SLO or a table may name: (field or function, what it is in words). All are seconds.
LATENCIES: dict[str, str] = {
    "ttft": "time to first token, from the schedule",
    "ttft_service": "time to first token, from the send",
    "first_visible": "time to first visible token, from the schedule",
    "tpot": "time per output token after the first",
    "e2e": "time to last token, from the schedule",
    "e2e_service": "time to last token, from the send",
    "close": "time to the end of the response, from the schedule",
    "max_stall": "longest wait between two tokens of a request",
    "queue_delay": "wait in the client before the send",
}
POOLED: dict[str, str] = {
    "itl": "gap per token, all gaps of all requests",
    "icl": "gap between token-carrying events, all requests",
}
_NEED_TWO_TOKENS = frozenset({"tpot", "max_stall", "itl", "icl"})


def applies(metric: str, request: RequestMetrics) -> bool:
    """False where the metric has no meaning for this request: TPOT of one token is neither good nor bad."""
    base = metric.split("_p", 1)[0] if metric.startswith(("itl_p", "icl_p")) else metric
    return not (base in _NEED_TWO_TOKENS and request.ok and request.too_short)


def value_of(metric: str, request: RequestMetrics) -> float | None:
    """A per-request latency by name, in seconds. `itl_p99`: the 99th percentile of the request's own gaps."""
    if metric in LATENCIES:
        value: float | None = getattr(request, f"{metric}_s")
        return value
    for name in POOLED:
        if metric.startswith(f"{name}_p"):
            return percentile(pooled_of(name, request), float(metric[len(name) + 2 :]))
    raise KeyError(metric)


def pooled_of(metric: str, request: RequestMetrics) -> Sequence[float]:
    """The gaps that one request adds to a pooled metric."""
    return request.itl_s if metric == "itl" else request.icl_s
