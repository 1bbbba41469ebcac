"""The figures of one run: caption, a sentence on how to read it, SVG. None where there is nothing to see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.measure.analysis import Analysis
from paceline.measure.gates import GateResult
from paceline.measure.metrics import RequestMetrics
from paceline.measure.report import words
from paceline.measure.report.svg import Axis, Plot, Point, ecdf, seconds, share, thin, time_axis
from paceline.measure.timeline import Second, Span, bins, in_flight, whole_span
from paceline.measure.verdict import client_lateness

MANY = 3000  # single requests beyond this are not drawn one by one


@dataclass(frozen=True, slots=True)
class Figure:
    caption: str
    reading: str
    svg: str


def of_run(analysis: Analysis) -> list[Figure]:
    """All figures of a run, in the order of the page."""
    span = whole_span([request.record for request in analysis.run.requests])
    if span is None:
        return []
    # Few requests, few bins: a percentile of two values says nothing.
    rows = bins(analysis.run.requests, span, wanted=min(120, max(12, len(analysis.run.requests) // 5)))
    found = [
        first_token_over_time(analysis, span, rows),
        first_token_distribution(analysis),
        gaps_over_time(span, rows),
        gaps_distribution(analysis),
        load_over_time(analysis, span, rows),
        in_flight_over_time(analysis, span),
        tokens_over_time(analysis, span, rows),
        lengths(analysis.run.requests),
        client_error(analysis),
    ]
    return [figure for figure in found if figure is not None]


def _bounds(analysis: Analysis, metric: str) -> list[tuple[float, str]]:
    """Objectives and absolute gates on a latency: (seconds, label); those at one place share a label."""
    found: dict[float, list[str]] = {}
    for slo in analysis.run.goodput.slos:
        if slo.metric == metric:
            found.setdefault(slo.bound_s, []).append("objective")
    for result in analysis.verdict.gates:
        if result.gate.metric == metric and result.bound is not None and result.gate.unit == "s":
            found.setdefault(result.bound, []).append(f"gate {_statistic(result)}")
    return [(bound, f"{', '.join(names)}: {words.duration(bound)}") for bound, names in list(found.items())[:3]]


def _statistic(result: GateResult) -> str:
    gate = result.gate
    return f"p{gate.q:g}" if gate.q is not None else gate.kind


def _time_x(span: Span) -> Axis:
    return Axis.linear(min(span.start_s, 0.0), span.end_s, "time since the start of the schedule", seconds, tight=True)


def _lines(rows: Sequence[Second], name: str) -> list[Point]:
    middle = (rows[1].start_s - rows[0].start_s) / 2.0 if len(rows) > 1 else 0.0
    values = [(row.start_s + middle, getattr(row, name)) for row in rows]
    return [(when, value) for when, value in values if value is not None]


def first_token_over_time(analysis: Analysis, span: Span, rows: Sequence[Second]) -> Figure | None:
    good = [(r.record.scheduled_s, r.ttft_s) for r in analysis.run.requests if r.ttft_s is not None]
    failed = [r.record.scheduled_s for r in analysis.run.requests if not r.ok]
    if not good and not failed:
        return None
    bounds = _bounds(analysis, "ttft")
    y = time_axis([value for _, value in good] + [b for b, _ in bounds if good], "time to first token")
    plot = Plot(_time_x(span), y)
    if len(good) <= MANY:
        plot.points(good, "s1 faint", "one request", radius=2)
    if len(good) >= 40:
        plot.line(_lines(rows, "ttft_p50_s"), "s1", "median")
        plot.line(_lines(rows, "ttft_p95_s"), "s2", "p95")
    for bound, text in bounds:
        plot.horizontal(bound, text)
    plot.ticks_at_top(failed[:MANY], "bad", "failed")
    reading = "Each request at the time it was due. A level cloud is a steady server; a rising one cannot keep up."
    return Figure("First token, over the run", reading, plot.render("Time to first token over the run"))


def first_token_distribution(analysis: Analysis) -> Figure | None:
    judged = analysis.run.judged
    response = [r.ttft_s for r in judged if r.ttft_s is not None]
    if len(response) < 2:
        return None
    service = [r.ttft_service_s for r in judged if r.ttft_service_s is not None]
    bounds = _bounds(analysis, "ttft")
    x = time_axis(response + service + [bound for bound, _ in bounds], "time to first token")
    plot = Plot(x, Axis.linear(0.0, 1.0, "share of requests", share))
    total = len(judged)
    plot.line(ecdf(service, total), "s3 dash", "from the send", stepped=True)
    plot.line(ecdf(response, total), "s1", "from the schedule: what users felt", stepped=True)
    for bound, text in bounds:
        plot.vertical(bound, text)
    missing = total - len(response)
    reading = "How many requests had their first token within a time."
    if missing:
        reading += f" The curve ends below 100 %: {words.plural(missing, 'request')} failed or gave no token."
    return Figure("First token, all requests", reading, plot.render("Distribution of the time to first token"))


def gaps_over_time(span: Span, rows: Sequence[Second]) -> Figure | None:
    median, high = _lines(rows, "itl_p50_s"), _lines(rows, "itl_p95_s")
    if len(median) < 2:
        return None
    plot = Plot(_time_x(span), time_axis([v for _, v in median + high], "gap per token", logarithmic=False))
    plot.line(median, "s1", "median")
    plot.line(high, "s2", "p95")
    reading = (
        "The wait between tokens while the run went on. Rises follow the load: prefills of newcomers, fuller batches."
    )
    return Figure("Between tokens, over the run", reading, plot.render("Gap per token over the run"))


def gaps_distribution(analysis: Analysis) -> Figure | None:
    gaps = [gap for request in analysis.run.judged for gap in request.itl_s]
    stalls = [r.max_stall_s for r in analysis.run.judged if r.max_stall_s is not None]
    positive = [gap for gap in gaps if gap > 0.0]
    if len(positive) < 2:
        return None
    bounds = _bounds(analysis, "itl")
    x = time_axis([*positive, *stalls, *(bound for bound, _ in bounds)], "gap")
    plot = Plot(x, Axis.linear(0.0, 1.0, "share", share))
    plot.line(ecdf(gaps), "s1", "gap per token, all gaps", stepped=True)
    plot.line(ecdf(stalls), "s2", "longest gap of each request", stepped=True)
    for bound, text in bounds:
        plot.vertical(bound, text)
    reading = "All gaps, and the longest one of each answer, which is what its reader remembers."
    return Figure("Between tokens, all gaps", reading, plot.render("Distribution of gaps between tokens"))


def load_over_time(analysis: Analysis, span: Span, rows: Sequence[Second]) -> Figure | None:
    if len(rows) < 3:
        return None
    width = rows[1].start_s - rows[0].start_s
    scheduled = [(row.start_s, row.scheduled / width) for row in rows]
    finished = [(row.start_s, row.finished / width) for row in rows]
    failed = [(row.start_s, row.failed / width) for row in rows]
    top = max(value for _, value in scheduled + finished)
    plot = Plot(_time_x(span), Axis.linear(0.0, max(top, 1e-9), "requests per second"))
    plot.area(scheduled, "s4", "due")
    plot.line(finished, "s1", "finished", stepped=True)
    if any(value for _, value in failed):
        plot.line(failed, "bad", "failed", stepped=True)
    _shade(plot, analysis)
    reading = f"What was asked and what was done, in steps of {words.duration(width)}."
    return Figure("Load", reading, plot.render("Requests due and finished per second"))


def _shade(plot: Plot, analysis: Analysis) -> None:
    if analysis.run.plateau is not None:
        plot.span(analysis.run.plateau.span.start_s, analysis.run.plateau.span.end_s, "plateau")


def in_flight_over_time(analysis: Analysis, span: Span) -> Figure | None:
    steps = [(when, float(level)) for when, level in in_flight(r.record for r in analysis.run.requests)]
    if len(steps) < 3:
        return None
    server = {
        name: [(scrape.t_s, scrape.values[name]) for scrape in analysis.scrapes if name in scrape.values]
        for name in ("running", "waiting")
    }
    top = max(level for _, level in [*steps, *server["running"], *server["waiting"]])
    plot = Plot(_time_x(span), Axis.linear(0.0, top, "requests"))
    plot.area(thin(steps), "s4", "in flight, seen by the client")
    plot.line(server["running"], "s1", "server: running")
    plot.line(server["waiting"], "s2", "server: waiting")
    _shade(plot, analysis)
    reading = (
        "Requests sent and not yet answered. Growth without end is overload; the last ones drain after the load ends."
    )
    return Figure("In flight", reading, plot.render("Requests in flight over the run"))


def tokens_over_time(analysis: Analysis, span: Span, rows: Sequence[Second]) -> Figure | None:
    if len(rows) < 3 or not any(row.tokens for row in rows):
        return None
    width = rows[1].start_s - rows[0].start_s
    rate = [(row.start_s, row.tokens / width) for row in rows]
    plot = Plot(_time_x(span), Axis.linear(0.0, max(value for _, value in rate), "output tokens per second"))
    plot.area(rate, "s5", "output tokens per second")
    _shade(plot, analysis)
    plateau, whole = analysis.run.plateau, analysis.run.whole
    if plateau is not None and plateau.output_tokens.per_s is not None:
        plot.horizontal(plateau.output_tokens.per_s, f"plateau {words.count(plateau.output_tokens.per_s)}/s")
    reading = "Tokens when they arrived."
    if whole is not None and whole.output_tokens.per_s is not None:
        reading += f" Over the whole run, ramp and drain included: {words.count(whole.output_tokens.per_s)} per second."
    return Figure("Tokens", reading, plot.render("Output tokens per second over the run"))


def lengths(requests: Iterable[RequestMetrics]) -> Figure | None:
    """First token against prompt length, where lengths differ."""
    points = [(float(r.input_tokens), r.ttft_s) for r in requests if r.input_tokens and r.ttft_s is not None]
    sizes = {size for size, _ in points}
    if len(points) < 10 or len(points) > MANY or max(sizes) < 1.2 * min(sizes):
        return None
    x = Axis.log(min(sizes), max(sizes), "prompt tokens") if max(sizes) > 20 * min(sizes) else Axis.linear(
        0.0, max(sizes), "prompt tokens"
    )  # fmt: skip
    plot = Plot(x, time_axis([value for _, value in points], "time to first token"))
    plot.points(points, "s1 faint", "one request", radius=2.2)
    reading = "A longer prompt takes longer to read; the spread at one length is the queue."
    return Figure("First token, by prompt length", reading, plot.render("Time to first token by prompt length"))


def client_error(analysis: Analysis) -> Figure | None:
    late = [max(value, 1e-6) for value in client_lateness(analysis.records)]
    lags = [max(lag, 1e-6) for sample in analysis.samples for lag in sample.lags_s]
    if len(late) < 10:
        return None
    x = Axis.log(1e-5, max(0.02, *late, *lags), "how late", seconds)
    plot = Plot(x, Axis.linear(0.0, 1.0, "share", share))
    plot.line(ecdf(late), "s1", "request sent after it was due", stepped=True)
    if lags:
        plot.line(ecdf(lags), "s3 dash", "event loop woke after its time", stepped=True)
    plot.vertical(0.005, "5 ms: late")
    worst = max((value for value in late if math.isfinite(value)), default=0.0)
    reading = f"The client's own error, all of it inside the latencies above; the worst was {words.duration(worst)}."
    return Figure("How exact the client was", reading, plot.render("Lateness of the measuring client"))
