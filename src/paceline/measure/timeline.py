"""A run along its time axis: requests in flight, the steady plateau, tokens as they arrived, figures per second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.measure.metrics import RequestMetrics
from paceline.measure.records import RequestRecord
from paceline.measure.stats import percentile

PLATEAU_SHARE = 0.95  # of the concurrency cap
DIP_S = 0.1  # a slot that asks again needs a moment; a shorter dip does not end the plateau


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the schedule's axis, in seconds."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def whole_span(records: Sequence[RequestRecord]) -> Span | None:
    """From the first scheduled time to the last end of a response; None for no ended request."""
    ends = [record.closed_s for record in records if record.closed_s is not None]
    if not ends:
        return None
    start = min(record.scheduled_s for record in records)
    return Span(start, max(ends)) if max(ends) > start else None


def in_flight(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests at the server from then on), one step per change, in order of time."""
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.dispatched_s is not None and record.closed_s is not None:
            changes += [(record.dispatched_s, 1), (record.closed_s, -1)]
    changes.sort()
    level = 0
    steps: list[tuple[float, int]] = []
    for when, group in itertools.groupby(changes, key=lambda change: change[0]):
        level += sum(delta for _, delta in group)
        steps.append((when, level))
    return steps


def mean_in_flight(steps: Sequence[tuple[float, int]], span: Span) -> float | None:
    """Time-average of the step function over a span."""
    if span.seconds <= 0.0:
        return None
    area, level, since = 0.0, 0, span.start_s
    for when, new in steps:
        if when > span.end_s:
            break
        if when > since:
            area += level * (when - since)
            since = when
        level = new
    area += level * (span.end_s - since)
    return area / span.seconds


def closed_loop_plateau(records: Sequence[RequestRecord], concurrency: int) -> Span | None:
    """Longest span with at least 95 % of the slots busy: without the ramp, and without the drain's stragglers."""
    level_wanted = PLATEAU_SHARE * concurrency
    best: Span | None = None
    start: float | None = None
    below: float | None = None  # since when the level is too low
    for when, level in in_flight(records):
        if below is not None and when - below > DIP_S:
            start = None
        if level >= level_wanted:
            start = when if start is None else start
            below = None
        elif below is None:
            below = when
            if start is not None and (best is None or when - start > best.seconds):
                best = Span(start, when)
    return best if best is not None and best.seconds > 0.0 else None


def open_loop_plateau(records: Sequence[RequestRecord]) -> Span | None:
    """From one median response time after the first arrival (the ramp) to the last arrival (then it drains)."""
    took = [r.closed_s - r.scheduled_s for r in records if r.ok and r.closed_s is not None]
    median = percentile(took, 50.0)
    if median is None:
        return None
    arrivals = [record.scheduled_s for record in records]
    span = Span(min(arrivals) + median, max(arrivals))
    return span if span.seconds > 0.0 else None


def token_arrivals(request: RequestMetrics) -> list[tuple[float, float]]:
    """(time, tokens) of a successful request. The sum is its output tokens; [] where they are unknown."""
    total = request.output_tokens
    if not request.ok or not total:
        return []
    record = request.record
    if request.ttft_s is None:  # a body that was not streamed
        return [] if request.e2e_s is None else [(record.scheduled_s + request.e2e_s, float(total))]
    later = sum(gap.tokens for gap in request.gaps)
    first = max(total - later, 1)
    scale = total / (first + later)  # below 1 only where events outnumber tokens
    head = (record.scheduled_s + request.ttft_s, first * scale)
    return [head, *((gap.at_s, gap.tokens * scale) for gap in request.gaps)]


@dataclass(frozen=True, slots=True)
class Second:
    """One bin of the run for figures. Percentiles are of requests *scheduled* in it; counts of what happened in it."""

    start_s: float
    scheduled: int
    failed: int
    finished: int
    tokens: float
    in_flight: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None


def bins(requests: Sequence[RequestMetrics], span: Span, wanted: int = 120) -> list[Second]:
    """The run in at most about `wanted` bins of a round width."""
    width = _round_width(span.seconds / wanted)
    count = max(1, math.ceil(span.seconds / width - 1e-9))
    scheduled = [0] * count
    failed = [0] * count
    finished = [0] * count
    tokens = [0.0] * count
    ttft: list[list[float]] = [[] for _ in range(count)]
    itl: list[list[float]] = [[] for _ in range(count)]

    def place(when: float) -> int:
        return min(max(int((when - span.start_s) / width), 0), count - 1)

    for request in requests:
        record = request.record
        at = place(record.scheduled_s)
        scheduled[at] += 1
        failed[at] += not request.ok
        if request.ok and record.closed_s is not None:
            finished[place(record.closed_s)] += 1
        if request.ttft_s is not None:
            ttft[at].append(request.ttft_s)
        for when, amount in token_arrivals(request):
            tokens[place(when)] += amount
        for gap in request.gaps:
            itl[place(gap.at_s)].extend([gap.seconds / gap.tokens] * gap.tokens)
    steps = in_flight(request.record for request in requests)
    levels = _mean_levels(steps, [span.start_s + i * width for i in range(count + 1)])
    return [
        Second(
            start_s=span.start_s + i * width,
            scheduled=scheduled[i],
            failed=failed[i],
            finished=finished[i],
            tokens=tokens[i],
            in_flight=levels[i],
            ttft_p50_s=percentile(ttft[i], 50.0),
            ttft_p95_s=percentile(ttft[i], 95.0),
            itl_p50_s=percentile(itl[i], 50.0),
            itl_p95_s=percentile(itl[i], 95.0),
        )
        for i in range(count)
    ]


def _round_width(width: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(width, 1e-3)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= width * (1.0 - 1e-9))


def _mean_levels(steps: Sequence[tuple[float, int]], edges: Sequence[float]) -> list[float]:
    """Time-average of the step function between consecutive edges, in one pass."""
    means: list[float] = []
    at, level = 0, 0
    for start, end in itertools.pairwise(edges):
        area, since = 0.0, start
        while at < len(steps) and steps[at][0] < end:
            when, new = steps[at]
            if when > since:
                area += level * (when - since)
                since = when
            level = new
            at += 1
        means.append((area + level * (end - since)) / (end - start))
    return means
