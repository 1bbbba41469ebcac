"""Records made by hand for the tests of metrics, statistics, gates, verdicts and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.measure.records import ErrorClass, RequestRecord, Usage
from paceline.measure.summary import RunMetrics, measure_run


def streamed(
    times_ms: Sequence[float],
    *,
    at_s: float = 0.0,
    sent_ms: float = 0.0,
    kinds: str | None = None,
    chars: Sequence[int] | None = None,
    n: int | None = None,
    close_ms: float | None = None,
    **fields: Any,
) -> RequestRecord:
    """A successful stream: one event per entry of `times_ms` (after the schedule), equal times in one read."""
    kinds = kinds or "c" * len(times_ms)
    reads = sorted(set(times_ms))
    fields.setdefault("id", f"r{at_s:.6f}")
    fields.setdefault("index", 0)
    if n is not None and "usage" not in fields:
        fields["usage"] = Usage(prompt_tokens=100, completion_tokens=n)
    end = close_ms if close_ms is not None else max([*times_ms, sent_ms])
    return RequestRecord(
        scheduled_s=at_s,
        dispatched_s=at_s + sent_ms / 1e3,
        written_s=at_s + sent_ms / 1e3,
        closed_s=at_s + end / 1e3,
        status=200,
        read_s=tuple(at_s + t / 1e3 for t in reads),
        read_bytes=tuple(10 for _ in reads),
        kinds=kinds,
        row_reads=tuple(reads.index(t) for t in times_ms),
        row_chars=tuple(chars or [4 if kind in "cxfrtm" else 0 for kind in kinds]),
        done_seen=True,
        finish_reason="stop",
        **fields,
    )


def failed(
    error: ErrorClass = ErrorClass.REJECTED, *, at_s: float = 0.0, after_ms: float = 1.0, **fields: Any
) -> RequestRecord:
    fields.setdefault("id", f"f{at_s:.6f}")
    fields.setdefault("index", 0)
    fields.setdefault("status", 503)
    return RequestRecord(
        scheduled_s=at_s, dispatched_s=at_s, written_s=at_s, closed_s=at_s + after_ms / 1e3, error=error, **fields
    )


def run_of(ttft_ms: Sequence[float], *, every_s: float = 0.1, itl_ms: float = 20.0, tokens: int = 5) -> RunMetrics:
    """A run whose i-th request has that TTFT, then `tokens` tokens evenly spaced; +inf is a failed request."""
    return measure_run(records_of(ttft_ms, every_s=every_s, itl_ms=itl_ms, tokens=tokens))


def records_of(
    ttft_ms: Sequence[float], *, every_s: float = 0.1, itl_ms: float = 20.0, tokens: int = 5
) -> list[RequestRecord]:
    return [
        failed(at_s=i * every_s, id=f"q{i}", index=i)
        if first == float("inf")
        else streamed([first + k * itl_ms for k in range(tokens)], at_s=i * every_s, n=tokens, id=f"q{i}", index=i)
        for i, first in enumerate(ttft_ms)
    ]
