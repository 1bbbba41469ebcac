"""The page of a sweep: what load costs in latency, and where the promise ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measure.analysis import Analysis
from paceline.measure.report import words
from paceline.measure.report.figures import Figure
from paceline.measure.report.html import Cell, Entry, facts, heading, page, paragraph, table
from paceline.measure.report.html import figures as figure_grid
from paceline.measure.report.html import verdict as verdict_box
from paceline.measure.report.runpage import GLOSSARY, title_of
from paceline.measure.report.svg import Axis, Plot, Point, near_axis, share, time_axis
from paceline.measure.verdict import Outcome


@dataclass(frozen=True, slots=True)
class Row:
    """One point: its load, its run, its folder; `note` is what a search made of it."""

    value: float
    analysis: Analysis
    name: str
    note: str = ""

    @property
    def valid(self) -> bool:
        return self.analysis.verdict.outcome is not Outcome.INVALID

    def latency(self, name: str, q: float) -> float | None:
        found = self.analysis.run.latencies[name].quantile(q)
        return None if found is None else found.value

    @property
    def output_per_s(self) -> float | None:
        span = self.analysis.run.plateau or self.analysis.run.whole
        return None if span is None else span.output_tokens.per_s

    @property
    def requests_per_s(self) -> float | None:
        span = self.analysis.run.plateau or self.analysis.run.whole
        return None if span is None else span.requests.per_s


def render(axis: str, rows: Sequence[Row], capacity: tuple[str, str] | None = None) -> str:
    """The whole page. `capacity`: the answer of a search and its reason."""
    first = rows[0].analysis if rows else None
    kind = "Capacity" if capacity else "Sweep"
    title = f"{kind}: {title_of(first)}" if first is not None else kind
    unit = "requests per second" if axis == "rate" else "concurrent requests"
    target = first.manifest.target if first is not None else {}
    body = [
        heading(title, 1),
        paragraph(" · ".join(str(target[k]) for k in ("model", "engine", "url") if target.get(k)), "soft"),
    ]
    if capacity is not None:
        body.append(verdict_box("FAIL" if capacity[0] == "none" else "PASS", f"{capacity[0]}. {capacity[1]}"))
    if first is not None:
        body += [heading("What was asked"), paragraph(words.load(first.plan, axis))]
        if first.plan.gates or first.plan.slos:
            body.append(paragraph("Promise: " + ", ".join([*first.plan.slos, *first.plan.gates]) + "."))
    body += [
        heading("What load costs"),
        figure_grid(of_sweep(axis, unit, rows)),
        heading("Points"),
        _table(axis, rows),
        _remarks(rows),
        heading("Words"),
        facts(GLOSSARY),
    ]
    return page(title, body)


def of_sweep(axis: str, unit: str, rows: Sequence[Row]) -> list[Figure]:
    """The figures; points whose run is INVALID are left out of lines."""
    rows = [row for row in rows if row.valid]
    found = [
        _against_load(unit, rows, "ttft", "First token"),
        _against_load(unit, rows, "itl", "Between tokens"),
        _latency_throughput(unit, rows),
        _frontier(unit, rows),
        _rates(axis, unit, rows),
        _goodput(unit, rows),
    ]
    return [figure for figure in found if figure is not None]


def _load_axis(unit: str, rows: Sequence[Row]) -> Axis:
    values = [row.value for row in rows]
    if max(values) > 20 * min(values):
        return Axis.log(min(values) * 0.9, max(values) * 1.1, unit)
    return Axis.linear(0.0, max(values), unit)


def _title(row: Row, unit: str) -> str:
    ttft, itl = words.duration(row.latency("ttft", 95.0)), words.duration(row.latency("itl", 95.0))
    return f"{row.value:g} {unit}: TTFT p95 {ttft}, ITL p95 {itl}, {words.count(row.output_per_s)} output tokens/s"


def _against_load(unit: str, rows: Sequence[Row], metric: str, caption: str) -> Figure | None:
    lines: dict[float, list[Point]] = {}
    for q in (50.0, 95.0, 99.0):
        pairs = [(row.value, row.latency(metric, q)) for row in rows]
        lines[q] = [(x, y) for x, y in pairs if y is not None]
    if len(lines[50.0]) < 2:
        return None
    every = [y for points in lines.values() for _, y in points]
    bounds = [(slo.bound_s, str(slo)) for slo in rows[0].analysis.run.goodput.slos if slo.metric == metric]
    y = time_axis(
        [*every, *(bound for bound, _ in bounds)], "time to first token" if metric == "ttft" else "gap per token"
    )
    plot = Plot(_load_axis(unit, rows), y)
    low, high = _interval(rows, metric)
    plot.band(low, high, "s2")
    for (q, points), style in zip(lines.items(), ("s1", "s2", "s3"), strict=True):
        plot.line(points, style, f"p{q:g}")
        plot.points(points, style, radius=3)
    for bound, text in bounds:
        plot.horizontal(bound, text)
    knee = "The knee is where queues begin to grow." if metric == "ttft" else "It grows with the size of the batch."
    reading = f"The band is the 95 % interval of p95. {knee}"
    return Figure(f"{caption}, by load", reading, plot.render(f"{caption} by load"))


def _interval(rows: Sequence[Row], metric: str) -> tuple[list[Point], list[Point]]:
    low: list[Point] = []
    high: list[Point] = []
    for row in rows:
        found = row.analysis.run.latencies[metric].quantile(95.0)
        if found is not None and found.low is not None and found.high is not None:
            low.append((row.value, found.low))
            high.append((row.value, found.high))
    return low, high


def _latency_throughput(unit: str, rows: Sequence[Row]) -> Figure | None:
    pairs = [(row, row.output_per_s, row.latency("e2e", 50.0), row.latency("e2e", 95.0)) for row in rows]
    kept = [(row, x, median, high) for row, x, median, high in pairs if x and median and high]
    if len(kept) < 2:
        return None
    x_axis = Axis.linear(0.0, max(x for _, x, _, _ in kept), "output tokens per second")
    plot = Plot(x_axis, time_axis([y for _, _, a, b in kept for y in (a, b)], "time to last token"))
    for style, name, points in (
        ("s1", "median", [(x, median) for _, x, median, _ in kept]),
        ("s2", "p95", [(x, high) for _, x, _, high in kept]),
    ):
        plot.line(points, style, name)
        plot.points(points, style, radius=3.5, titles=[_title(row, unit) for row, *_ in kept])
    for row, x, _, high in kept:
        plot.text((x, high), f"{row.value:g}", anchor="middle", dx=0, dy=-8)
    reading = f"Right is more work done, down is sooner done. Labels: {unit}. A line that turns back is overload."
    return Figure("Latency against throughput", reading, plot.render("Latency against throughput"))


def _frontier(unit: str, rows: Sequence[Row]) -> Figure | None:
    pairs = [(row, row.latency("ttft", 95.0), row.latency("itl", 95.0)) for row in rows]
    kept = [(row, ttft, itl) for row, ttft, itl in pairs if ttft and itl]
    if len(kept) < 2:
        return None
    points = [(ttft, itl) for _, ttft, itl in kept]
    wanted = [slo.bound_s for slo in rows[0].analysis.run.goodput.slos if slo.metric == "ttft"]
    x_axis = near_axis([ttft for ttft, _ in points] + wanted, "TTFT p95")
    plot = Plot(x_axis, near_axis([itl for _, itl in points], "ITL p95"))
    plot.line(points, "s4", "in order of load")
    front = [p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)]
    plot.points(points, "s1", radius=3.5, titles=[_title(row, unit) for row, *_ in kept])
    plot.points(front, "good", "no other point is better in both", radius=4.5)
    for row, ttft, itl in kept:
        plot.text((ttft, itl), f"{row.value:g}", dx=7, dy=-7)
    for bound in wanted:
        plot.vertical(bound, f"objective {words.duration(bound)}")
    reading = "Newcomers wait on one axis, everybody else on the other: a scheduler trades them. Lower left is better."
    return Figure("First token against the rest", reading, plot.render("TTFT against ITL"))


def _rates(axis: str, unit: str, rows: Sequence[Row]) -> Figure | None:
    done = [(row.value, row.requests_per_s) for row in rows]
    points = [(x, y) for x, y in done if y is not None]
    if len(points) < 2:
        return None
    top = max([y for _, y in points] + ([x for x, _ in points] if axis == "rate" else []))
    plot = Plot(_load_axis(unit, rows), Axis.linear(0.0, top, "answers per second"))
    if axis == "rate":
        plot.line([(x, x) for x, _ in points], "s4 dash", "as many as asked")
    plot.line(points, "s1", "answered")
    plot.points(points, "s1", radius=3)
    return Figure(
        "Answers", "Where the line bends away, the server has reached its limit.", plot.render("Answers by load")
    )


def _goodput(unit: str, rows: Sequence[Row]) -> Figure | None:
    if not rows or not rows[0].analysis.run.goodput.slos:
        return None
    found = [(row.value, row.analysis.run.goodput) for row in rows]
    points = [(x, g.share) for x, g in found if g.share is not None]
    if len(points) < 2:
        return None
    plot = Plot(_load_axis(unit, rows), Axis.linear(0.0, 1.0, "goodput", share))
    low = [(x, g.low) for x, g in found if g.low is not None]
    high = [(x, g.high) for x, g in found if g.high is not None]
    plot.band(low, high, "s5")
    plot.line(points, "s5", ", ".join(map(str, found[0][1].slos)))
    plot.points(points, "s5", radius=3)
    reading = "Share of all sent requests that met every objective, with its 95 % interval."
    return Figure("Goodput", reading, plot.render("Goodput by load"))


def _table(axis: str, rows: Sequence[Row]) -> str:
    cells: list[list[Entry]] = []
    for row in rows:
        run, outcome = row.analysis.run, row.analysis.verdict.outcome.value
        line: list[Entry] = [
            Cell(f"{row.value:g}", row.name, "left"),
            Cell(outcome, style=f"tag {outcome}", title=row.analysis.verdict.headline),
            f"{len(run.requests):,}",
            words.percent(run.success_share),
            words.count(row.requests_per_s),
            words.count(row.output_per_s),
        ]
        for metric in ("ttft", "itl", "e2e"):
            line += [words.duration(row.latency(metric, q)) for q in (50.0, 95.0)]
        line.append(words.percent(run.goodput.share) if run.goodput.slos else "")
        cells.append(line)
    head: list[Entry] = [axis, "", "sent", "success", "answers/s", "output tokens/s"]
    head += ["TTFT p50", "p95", "ITL p50", "p95", "E2E p50", "p95", "goodput"]
    return table(head, cells)


def _remarks(rows: Sequence[Row]) -> str:
    """What a search made of each point, or why a point is not PASS."""
    told = [
        (f"{row.value:g}", row.note or f"{row.analysis.verdict.outcome}: {row.analysis.verdict.headline}")
        for row in rows
        if row.note or row.analysis.verdict.outcome is not Outcome.PASS
    ]
    return facts(told) if told else ""
