"""Results on a terminal: what was measured, against which promise, and how far to trust it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.measure.analysis import Analysis
from paceline.measure.capacity import Capacity
from paceline.measure.compare import Comparison
from paceline.measure.report.words import count, duration, interval, money, percent, plural, shares
from paceline.measure.stats import Quantile
from paceline.measure.summary import Summary, Throughput
from paceline.measure.sweep import Point
from paceline.measure.verdict import Level, Outcome

COLOURS = {
    Outcome.PASS: "green",
    Outcome.FAIL: "red",
    Outcome.UNDECIDED: "yellow",
    Outcome.DEGRADED: "yellow",
    Outcome.INVALID: "red",
}
WIDE = 100  # columns that the whole table of latencies takes
_SHOWN = (
    ("ttft", "TTFT"),
    ("ttft_service", "TTFT, sent"),
    ("first_visible", "first visible"),
    ("itl", "ITL"),
    ("tpot", "TPOT"),
    ("e2e", "E2E"),
    ("max_stall", "longest stall"),
    ("queue_delay", "queue delay"),
)


def print_analysis(console: Console, analysis: Analysis) -> None:
    """One run: latencies, rates, gates, verdict."""
    console.print(_heading(analysis), highlight=False)
    console.print(_latencies(analysis, console.width))
    console.print(_rates(analysis), highlight=False)
    for text in _notes(analysis):
        console.print(text, style="dim", highlight=False, markup=False)
    if analysis.verdict.gates:
        console.print(_gates(analysis))
    console.print(verdict_line(analysis), highlight=False)


def verdict_line(analysis: Analysis) -> Text:
    """The verdict in one coloured line."""
    verdict = analysis.verdict
    return Text(f"{verdict.outcome.value}  ", style=f"bold {COLOURS[verdict.outcome]}").append(
        verdict.headline, style="default not bold"
    )


def _heading(analysis: Analysis) -> Text:
    run, target = analysis.run, analysis.manifest.target
    engine = " ".join(str(target[key]) for key in ("engine", "engine_version") if target.get(key))
    text = Text(f"{target.get('model', '?')}", style="bold").append(f" on {engine or 'an unknown engine'}", style="dim")
    text.append(f"\n{plural(run.succeeded, 'request')} succeeded, {run.failed:,} failed")
    if run.errors:
        text.append(f" ({', '.join(f'{error.value} {n:,}' for error, n in run.errors.items())})", style="red")
    if run.cancelled:
        text.append(f", {run.cancelled:,} cut off")
    return text


def _latencies(analysis: Analysis, width: int) -> Table:
    """All columns where they fit; a narrow window keeps what is asked for first."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    names = ["", "mean", "p50", "p90", "p95", "p99", "p99 all", "n", "undefined", "failed"]
    kept = [i for i, name in enumerate(names) if width >= WIDE or name not in ("p90", "undefined", "failed")]
    for i in kept:
        table.add_column(names[i], justify="right" if i else "left", no_wrap=True)
    for key, label in _SHOWN:
        summary = analysis.run.latencies.get(key)
        if summary is not None and (summary.n or summary.n_undefined):
            cells = [label, *_latency_cells(summary)]
            table.add_row(*(cells[i] for i in kept))
    return table


def _latency_cells(summary: Summary) -> list[str]:
    cells = [duration(summary.mean)]
    cells += [_percentile(summary.quantile(q)) for q in (50.0, 90.0, 95.0, 99.0)]
    cells.append(_percentile(summary.quantile(99.0, with_failures=True)))
    return [*cells, f"{summary.n:,}", f"{summary.n_undefined:,}", f"{summary.n_failed:,}"]


def _percentile(quantile: Quantile | None) -> str:
    """A value, with a mark where too few stand behind it."""
    if quantile is None or quantile.value is None:
        return "–"
    return ("~" if quantile.thin else "") + duration(quantile.value)


def _rates(analysis: Analysis) -> Table:
    run = analysis.run
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("per second", "requests", "input tok", "output tok", "all tok", "in flight"):
        table.add_column(name, justify="left" if name == "per second" else "right")
    for label, part in (("whole run", run.whole), ("plateau", run.plateau)):
        if part is not None:
            table.add_row(f"{label}, {duration(part.span.seconds)}", *_rate_cells(part))
    return table


def _rate_cells(part: Throughput) -> list[str]:
    rates = (part.requests, part.input_tokens, part.output_tokens, part.total_tokens)
    return [count(rate.per_s) for rate in rates] + [count(part.mean_in_flight)]


def _notes(analysis: Analysis) -> Iterable[str]:
    run, check = analysis.run, analysis.manifest.self_check
    yield (
        f"from the scheduled time, except “sent”; percentiles: {run.percentile_method}, ~ has few values behind it; "
        "“p99 all” takes each failure as endless"
    )
    p95 = run.latencies["ttft"].quantile(95.0) if "ttft" in run.latencies else None
    if p95 is not None and p95.value is not None:
        yield f"TTFT p95 lies between {interval(p95)} (95 %)"
    if run.goodput.slos and run.goodput.share is not None:
        objectives = ", ".join(map(str, run.goodput.slos))
        yield f"goodput {percent(run.goodput.share)} of those sent met {objectives}"
    if check is not None and check.ttft_error_p50_ms is not None:
        yield (
            f"the client's own error at {check.streams} streams: TTFT {check.ttft_error_p50_ms:+.2f} ms (median), "
            f"ITL {check.itl_error_p99_ms or 0.0:.2f} ms (p99)"
        )
    cross = analysis.crosscheck
    if cross.cache_hit_share is not None:
        yield f"the server's prefix cache held {percent(cross.cache_hit_share)} of the prompt tokens"
    if cross.preemptions:
        yield f"the server preempted {cross.preemptions:,.0f} times"
    for name, one in analysis.manifest.engine.get("usage", {}).items():
        kv = f"KV held {percent(one['kv_used_mean'])} (at most {percent(one['kv_used_max'])})"
        bound = f"steps bound by {shares(one['bound_share'])}"
        hardware = f"; hardware by {shares(one['limit_share'])}" if one["limit_share"] else ""
        yield f"{name}: busy {percent(one['utilisation'])}, {one['steps']:,} steps, {kv}; {bound}{hardware}"
    if analysis.cost is not None:
        cost = analysis.cost
        yield (
            f"cost {money(cost.total)}: {money(cost.per_request)} a request, "
            f"{money(cost.per_million_output)} a million output tokens"
        )
    for reason in analysis.verdict.reasons:
        if reason.level is not Level.NOTE or analysis.verdict.outcome is not Outcome.PASS:
            yield f"{reason.level.value}: {reason.text}"
    yield from analysis.manifest.warnings


def _gates(analysis: Analysis) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("gate", "measured", "", "why"):
        table.add_column(name)
    styles = {"PASS": "green", "FAIL": "red", "UNDECIDED": "yellow"}
    for result in analysis.verdict.gates:
        status = Text(result.status.value, style=styles[result.status.value])
        table.add_row(result.gate.text, result.value_text, status, Text(result.why, style="dim"))
    return table


def print_sweep(console: Console, axis: str, points: Sequence[Point]) -> None:
    """One line a point."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in (
        axis,
        "requests/s",
        "output tok/s",
        "TTFT p50",
        "TTFT p95",
        "ITL p50",
        "ITL p99",
        "E2E p95",
        "verdict",
    ):
        table.add_column(name, justify="right")
    for point in points:
        run, outcome = point.analysis.run, point.analysis.verdict.outcome
        part = run.plateau or run.whole
        cells = [_percentile(run.latencies[n].quantile(q)) for n, q in _SWEEP_COLUMNS]
        rates = ["–", "–"] if part is None else [count(part.requests.per_s), count(part.output_tokens.per_s)]
        table.add_row(f"{point.value:g}", *rates, *cells, Text(outcome.value, style=COLOURS[outcome]))
    console.print(table)


_SWEEP_COLUMNS = (("ttft", 50.0), ("ttft", 95.0), ("itl", 50.0), ("itl", 99.0), ("e2e", 95.0))


def print_capacity(console: Console, found: Capacity) -> None:
    """The trials in the order they ran, then the answer."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("rate", "run", "answer", "why"):
        table.add_column(name, justify="right" if name == "rate" else "left")
    styles = {"holds": "green", "fails": "red", "open": "yellow", "invalid": "red"}
    for trial in found.trials:
        which = f"{trial.attempt}{' (confirming)' if trial.confirming else ''}"
        answer = Text(trial.answer.value, style=styles.get(trial.answer.value, ""))
        table.add_row(f"{trial.rate:g}", which, answer, Text(trial.why, style="dim"))
    console.print(table)
    console.print(Text("capacity: ", style="bold").append(found.shown).append(f"   {found.why}", style="dim"))


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Every statistic of both arms with its ratio, then the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    a, b = comparison.name_a, comparison.name_b
    for name in ("", a, b, f"{b} / {a}", "95 % interval", "noise", "verdict"):
        table.add_column(name, justify="left" if not name else "right")
    for row in comparison.rows:
        show = count if row.name.endswith("throughput") else duration
        ratio = row.ratio
        between = "–" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} … {ratio.high:.3f}"
        table.add_row(
            row.name + (" *" if row.decides else ""),
            show(row.a),
            show(row.b),
            "–" if ratio.median is None else f"{ratio.median:.3f}",
            between,
            "–" if ratio.noise is None else f"{ratio.noise:.3f}",
            ratio.verdict.value,
        )
    console.print(table)
    pairs = f"{comparison.pairs} pairs, {comparison.aa_pairs} A/A pairs, cache {comparison.cache}"
    console.print(f"* decides; {pairs}; smallest effect of interest {percent(comparison.smallest_effect)}", style="dim")
    for name in comparison.dropped:
        console.print(f"left out: {name}", style="dim", markup=False)
    head = Text(f"{comparison.verdict.value}  ", style="bold")
    console.print(head.append(comparison.why, style="default not bold"), highlight=False)
