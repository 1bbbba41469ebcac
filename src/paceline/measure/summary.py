"""The numbers of one run: every metric with its n, its undefined, its failed, its intervals; rates; error classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.measure import metrics, stats
from paceline.measure.metrics import LATENCIES, POOLED, RequestMetrics, TokenSource
from paceline.measure.records import ErrorClass, RequestRecord
from paceline.measure.slo import Goodput, Slo, goodput
from paceline.measure.stats import PERCENTILES, Quantile
from paceline.measure.timeline import (
    Span,
    closed_loop_plateau,
    in_flight,
    mean_in_flight,
    open_loop_plateau,
    token_arrivals,
    whole_span,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """One latency over a run, in seconds.

    `quantiles` are of defined values of successful requests; `tail` is the same with each failed request as +inf, so
    that a server cannot look fast by failing. For pooled gaps `n` counts gaps, while `n_requests` decides how wide the
    intervals are: the gaps of one request are not independent. A failed request enters their tail as +inf, as many
    times as a median successful request has gaps.
    """

    name: str
    n: int
    n_requests: int
    n_undefined: int  # succeeded, the metric should exist and does not
    n_not_applicable: int  # succeeded, the metric has no meaning (TPOT of one token)
    n_failed: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    quantiles: tuple[Quantile, ...]
    tail: tuple[Quantile, ...]

    def quantile(self, q: float, *, with_failures: bool = False) -> Quantile | None:
        """One of the percentiles that were computed."""
        return next((entry for entry in (self.tail if with_failures else self.quantiles) if entry.q == q), None)


@dataclass(frozen=True, slots=True)
class Rate:
    """A total per second. `per_s` is None when some part of the total is unknown: then `known` is a lower bound."""

    per_s: float | None
    known: float
    n_unknown: int = 0  # successful requests whose count nobody told


@dataclass(frozen=True, slots=True)
class Throughput:
    """Successful requests and their tokens over a span."""

    span: Span
    requests: Rate
    input_tokens: Rate
    output_tokens: Rate
    total_tokens: Rate
    mean_in_flight: float | None


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """All of one run. `requests` are those sent and not cancelled; `judged` leaves out a closed loop's first wave."""

    requests: tuple[RequestMetrics, ...]
    judged: tuple[RequestMetrics, ...]
    planned: int  # records in all
    unsent: int
    cancelled: int
    succeeded: int
    failed: int
    errors: dict[ErrorClass, int]
    rejected_attempts: int  # earlier tries that were rejected or failed and tried again
    latencies: dict[str, Summary]
    whole: Throughput | None
    plateau: Throughput | None
    goodput: Goodput
    token_sources: dict[TokenSource, int]
    tokens_estimated: int  # requests whose tokens per event were estimated
    first_wave: int  # requests left out of `judged`
    ttft_trend: stats.Trend | None
    in_flight_trend: stats.Trend | None
    percentile_method: str = stats.METHOD
    itl_rule: str = metrics.ITL_RULE
    classes: dict[str, RunMetrics] = field(default_factory=dict)  # per traffic class, where there is more than one

    @property
    def success_share(self) -> float | None:
        return self.succeeded / len(self.requests) if self.requests else None


def measure_run(
    records: Sequence[RequestRecord],
    *,
    slos: Sequence[Slo] = (),
    concurrency: int | None = None,
    open_loop: bool = True,
    percentiles: Sequence[float] = PERCENTILES,
) -> RunMetrics:
    """Metrics of the records of one run (measured phase only, in order of scheduled time).

    `concurrency` is the closed loop's number of slots, which its plateau is cut by.
    """
    run = _measure(records, slos, None if open_loop else concurrency, open_loop, percentiles)
    names = sorted({record.traffic_class for record in records})
    if len(names) > 1:
        for name in names:
            own = [record for record in records if record.traffic_class == name]
            # A class has no plateau of its own in a closed loop: the slots are shared.
            run.classes[name or "(no class)"] = _measure(own, slos, None, open_loop, percentiles)
    return run


def _measure(
    records: Sequence[RequestRecord],
    slos: Sequence[Slo],
    concurrency: int | None,
    open_loop: bool,
    percentiles: Sequence[float],
) -> RunMetrics:
    kept = metrics.counted(records)
    requests = tuple(metrics.measure(record) for record in kept)
    settled = tuple(request for request in requests if not request.record.first_wave)
    judged = settled or requests  # a run of nothing but a first wave is all there is
    span = whole_span(kept)
    steady = open_loop_plateau(kept) if open_loop else closed_loop_plateau(kept, concurrency) if concurrency else None
    steps = in_flight(kept)
    succeeded = sum(request.ok for request in requests)
    return RunMetrics(
        requests=requests,
        judged=judged,
        planned=len(records),
        unsent=sum(not record.sent for record in records),
        cancelled=sum(record.sent and record.error is ErrorClass.CANCELLED for record in records),
        succeeded=succeeded,
        failed=len(requests) - succeeded,
        errors=dict(Counter(r.record.error for r in requests if r.record.error is not None).most_common()),
        rejected_attempts=sum(len(request.record.attempts) for request in requests),
        latencies={name: summarize(name, judged, percentiles) for name in (*LATENCIES, *POOLED)},
        whole=None if span is None else throughput(requests, span, mean_in_flight(steps, span)),
        plateau=None if steady is None else throughput(requests, steady, mean_in_flight(steps, steady)),
        goodput=goodput(requests, slos, None if span is None else span.seconds),
        token_sources=dict(Counter(request.token_source for request in requests if request.ok)),
        tokens_estimated=sum(request.tokens_estimated for request in requests),
        first_wave=len(requests) - len(judged),
        ttft_trend=stats.trend([request.ttft_s for request in judged if request.ttft_s is not None]),
        in_flight_trend=None if span is None else _in_flight_trend(steps, steady or span),
    )


def _in_flight_trend(steps: Sequence[tuple[float, int]], span: Span, points: int = 50) -> stats.Trend | None:
    width = span.seconds / points
    windows = (Span(span.start_s + i * width, span.start_s + (i + 1) * width) for i in range(points))
    levels = [mean_in_flight(steps, window) for window in windows]
    return stats.trend([level for level in levels if level is not None])


def summarize(name: str, requests: Sequence[RequestMetrics], percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """One latency over requests, whether per request or pooled from their gaps."""
    values, n_requests, undefined, not_applicable = collect(name, requests)
    failed = sum(not request.ok for request in requests)
    values.sort()
    infinite = [math.inf] * (failed * infinities_per_failure(name, values, n_requests))
    whole = [*values, *infinite]
    pooled = name in POOLED

    def quantiles(ordered: Sequence[float], independent: int) -> tuple[Quantile, ...]:
        if not pooled:
            return tuple(stats.quantile(ordered, q) for q in percentiles)
        return tuple(stats.pooled_quantile(ordered, q, independent) for q in percentiles)

    return Summary(
        name=name,
        n=len(values),
        n_requests=n_requests,
        n_undefined=undefined,
        n_not_applicable=not_applicable,
        n_failed=failed,
        mean=stats.mean(values),
        sd=stats.standard_deviation(values),
        low=values[0] if values else None,
        high=values[-1] if values else None,
        quantiles=quantiles(values, n_requests),
        tail=quantiles(whole, n_requests + failed),
    )


def collect(name: str, requests: Sequence[RequestMetrics]) -> tuple[list[float], int, int, int]:
    """Defined values of successful requests; then how many requests gave some, should have and did not, need not."""
    values: list[float] = []
    giving = undefined = not_applicable = 0
    for request in requests:
        if not request.ok:
            continue
        if name in POOLED:
            own: Sequence[float] = metrics.pooled_of(name, request)
        else:
            value = metrics.value_of(name, request)
            own = () if value is None else (value,)
        values.extend(own)
        if own:
            giving += 1
        elif metrics.applies(name, request):
            undefined += 1
        else:
            not_applicable += 1
    return values, giving, undefined, not_applicable


def infinities_per_failure(name: str, values: Sequence[float], n_requests: int) -> int:
    """How many +inf a failed request adds: one, or for pooled gaps as many as an average successful request has."""
    return max(1, round(len(values) / n_requests)) if name in POOLED and n_requests else 1


def throughput(requests: Sequence[RequestMetrics], span: Span, level: float | None) -> Throughput:
    """Rates within a span: requests by their end, input tokens by the first token, output tokens as they came."""
    good = [request for request in requests if request.ok]

    def inside(when: float | None) -> bool:
        return when is not None and span.start_s <= when <= span.end_s

    ended = [request for request in good if inside(request.record.closed_s)]
    prefilled = [request for request in good if inside(_prefilled_s(request))]
    tokens_in = [request.input_tokens for request in prefilled]
    touching = [r for r in good if r.record.scheduled_s <= span.end_s and (r.record.closed_s or 0.0) >= span.start_s]
    tokens_out = math.fsum(k for request in touching for when, k in token_arrivals(request) if inside(when))
    unknown_in = sum(count is None for count in tokens_in)
    unknown_out = sum(request.output_tokens is None for request in touching)
    known_in = float(sum(count for count in tokens_in if count is not None))

    def rate(total: float, unknown: int) -> Rate:
        return Rate(None if unknown else total / span.seconds, total, unknown)

    return Throughput(
        span=span,
        requests=rate(len(ended), 0),
        input_tokens=rate(known_in, unknown_in),
        output_tokens=rate(tokens_out, unknown_out),
        total_tokens=rate(known_in + tokens_out, max(unknown_in, unknown_out)),
        mean_in_flight=level,
    )


def _prefilled_s(request: RequestMetrics) -> float | None:
    """When its input had been read: the first token, or for want of one the end."""
    if request.ttft_s is not None:
        return request.record.scheduled_s + request.ttft_s
    return request.record.closed_s
