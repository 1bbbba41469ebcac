"""The same load under several policies: who pays for the first token, and who for the next.

members = run_family(points_of(plan, [1, 2, 4]), setup, ["slo", "decode_first"], "results/family")
write_family(members, plan, "results/family")       # report.html, summary.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.core.policies.registry import make_policy
from paceline.errors import ConfigError
from paceline.measure.analysis import Analysis, analyse
from paceline.measure.folder import write_atomically
from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.report import words
from paceline.measure.report.data import plain, to_json
from paceline.measure.report.figures import Figure
from paceline.measure.report.html import Entry, facts, heading, page, paragraph, table
from paceline.measure.report.html import figures as figure_grid
from paceline.measure.report.runpage import GLOSSARY
from paceline.measure.report.svg import Axis, Plot, Point, near_axis, share, time_axis
from paceline.measure.sweep import at_load
from paceline.simulate.progress import OnProgress
from paceline.simulate.run import EngineSetup, simulate

INDEX = "family.json"
TTFT_Q, ITL_Q = 95.0, 99.0  # the percentiles that are drawn against each other
STYLES = ("s1", "s2", "s3", "s4", "s5", "s6")


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load: its plan, and where it stands on the axis of all loads."""

    value: float
    plan: BenchPlan


@dataclass(frozen=True, slots=True)
class Member:
    """One policy under one load."""

    policy: str
    value: float
    folder: str
    ended: str
    analysis: Analysis

    @property
    def interrupted(self) -> bool:
        """Whether it is but a part of its run."""
        return self.ended == "interrupted"

    def latency(self, name: str, q: float) -> float | None:
        """A percentile in seconds."""
        found = self.analysis.run.latencies[name].quantile(q)
        return None if found is None else found.value

    @property
    def ttft_s(self) -> float | None:
        return self.latency("ttft", TTFT_Q)

    @property
    def itl_s(self) -> float | None:
        return self.latency("itl", ITL_Q)

    @property
    def output_per_s(self) -> float | None:
        whole = self.analysis.run.whole
        return None if whole is None else whole.output_tokens.per_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which a step was computed."""
        usage = self.analysis.manifest.engine["usage"]
        return float(sum(one["utilisation"] for one in usage.values()) / len(usage))

    def line(self) -> str:
        """In one line, for whoever watches."""
        text = f"{self.policy} at {self.value:g}: TTFT p95 {words.duration(self.ttft_s)}, "
        return f"{text}ITL p99 {words.duration(self.itl_s)}" + ("" if self.ended == "complete" else f", {self.ended}")


def points_of(plan: BenchPlan, values: Sequence[float]) -> list[LoadPoint]:
    """The plan at several rates; of a replayed trace, at several speeds. Without values, as it is."""
    if not values:
        own = plan.trace.speed if plan.trace is not None and plan.load.arrivals is Arrivals.TRACE else plan.load.rate
        return [LoadPoint(own or 0.0, plan)]
    if plan.load.arrivals is Arrivals.TRACE:
        assert plan.trace is not None
        trace = plan.trace
        return [
            LoadPoint(value, msgspec.structs.replace(plan, trace=msgspec.structs.replace(trace, speed=value)))
            for value in sorted(values)
        ]
    return [LoadPoint(value, at_load(plan, "rate", value, "")) for value in sorted(values)]


def run_family(
    points: Sequence[LoadPoint],
    setup: EngineSetup,
    policies: Sequence[str],
    out: str | Path,
    on_progress: OnProgress | None = None,
    on_member: Callable[[Member], None] | None = None,
) -> list[Member]:
    """Every policy under every load, a run folder each; all see the same arrivals.

    Ctrl-C keeps what has ended, and what the run under way knows so far: it is the last member, and says so (`ended`).
    Policy options count for the setup's own policy alone: the others run as they come. Raises ConfigError.
    """
    folder = Path(out)
    if (folder / INDEX).exists():
        raise ConfigError(f"{folder} already holds a comparison; choose another folder")
    for name in policies:
        make_policy(name)  # a wrong name is found out now
    members: list[Member] = []
    for name in dict.fromkeys(policies):
        options = setup.config.policy_options if name == setup.config.policy else ()
        own = replace(setup, config=replace(setup.config, policy=name, policy_options=options))
        for point in points:
            place = f"{name}-{point.value:g}"
            labels = {"policy": name, "point": f"{point.value:g}"}
            try:
                run, result = simulate(point.plan, own, folder / place, on_progress, labels=labels, parent=folder.name)
                members.append(Member(name, point.value, place, result.ended, analyse(run)))
                write_atomically(folder / INDEX, family_json(members))
            except KeyboardInterrupt:  # while a schedule is made, or a run is written or judged
                return members
            if on_member is not None:
                on_member(members[-1])
            if members[-1].interrupted:
                return members
    return members


def family_json(members: Sequence[Member]) -> bytes:
    """All of it, as plain values."""
    return to_json({"schema": 1, "members": [_row(member) for member in members]})


def _row(member: Member) -> dict[str, Any]:
    run = member.analysis.run
    return {
        "policy": member.policy,
        "load": member.value,
        "folder": member.folder,
        "ended": member.ended,
        "sent": len(run.requests),
        "succeeded": run.succeeded,
        "ttft_p50_s": plain(member.latency("ttft", 50.0)),
        "ttft_p95_s": plain(member.ttft_s),
        "itl_p50_s": plain(member.latency("itl", 50.0)),
        "itl_p99_s": plain(member.itl_s),
        "e2e_p50_s": plain(member.latency("e2e", 50.0)),
        "output_tokens_per_s": plain(member.output_per_s),
        "goodput": plain(run.goodput.share) if run.goodput.slos else None,
        "cost_per_million_output": plain(member.analysis.cost.per_million_output) if member.analysis.cost else None,
        "usage": member.analysis.manifest.engine.get("usage"),
    }


_HEAD = (
    *("policy", "load", "TTFT p50", "TTFT p95", "ITL p50", "ITL p99", "E2E p50", "output tok/s", "busy"),
    *("goodput", "cost, 1M tok", "ended"),
)


def _cells(member: Member) -> list[str]:
    run = member.analysis.run
    return [
        member.policy,
        f"{member.value:g}",
        words.duration(member.latency("ttft", 50.0)),
        words.duration(member.ttft_s),
        words.duration(member.latency("itl", 50.0)),
        words.duration(member.itl_s),
        words.duration(member.latency("e2e", 50.0)),
        words.count(member.output_per_s),
        words.percent(member.utilisation),
        words.percent(run.goodput.share) if run.goodput.slos else "",
        words.money(member.analysis.cost.per_million_output) if member.analysis.cost else "",
        member.ended,
    ]


def print_family(console: Console, members: Sequence[Member]) -> None:
    """A table for a terminal."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1))
    for i, name in enumerate(_HEAD):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for member in members:
        shown.add_row(*_cells(member))
    console.print(shown)


def write_family(members: Sequence[Member], plan: BenchPlan, out: str | Path) -> list[Path]:
    """report.html and summary.json."""
    folder = Path(out)
    files = {"report.html": render(members, plan).encode(), "summary.json": family_json(members)}
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def render(members: Sequence[Member], plan: BenchPlan) -> str:
    """The page: the frontier first."""
    names = ", ".join(dict.fromkeys(member.policy for member in members))
    title = plan.name or f"One load, several policies: {names}"
    unit = "speed of the trace" if plan.load.arrivals is Arrivals.TRACE else "requests per second"
    whole = [member for member in members if not member.interrupted]
    drawn = [
        frontier(whole, plan),
        _by_load(whole, unit, "ttft", TTFT_Q, "First token by load"),
        _by_load(whole, unit, "itl", ITL_Q, "Between tokens by load"),
        _goodput(whole, unit),
    ]
    parts = [f"{member.policy} at {member.value:g}" for member in members if member.interrupted]
    rows: list[list[Entry]] = [list(_cells(member)) for member in members]
    asked = [*plan.slos, *plan.gates]
    return page(
        title,
        [
            heading(title, 1),
            paragraph("simulated, not measured", "soft"),
            paragraph(words.load(plan)),
            *([paragraph("Promise: " + ", ".join(asked) + ".")] if asked else []),
            figure_grid([figure for figure in drawn if figure is not None]),
            heading("All runs"),
            *([paragraph(f"Interrupted: {', '.join(parts)} is a part of its run, and not drawn.")] if parts else []),
            table(list(_HEAD), rows),
            paragraph(f"Load: {unit}. The page of each run lies in the folder of its name.", "soft small"),
            heading("Words"),
            facts(GLOSSARY),
        ],
    )


def frontier(members: Sequence[Member], plan: BenchPlan) -> Figure | None:
    """TTFT against ITL, a line for each policy through its loads."""
    kept = [(member, member.ttft_s, member.itl_s) for member in members]
    known = [(member, ttft, itl) for member, ttft, itl in kept if ttft is not None and itl is not None]
    if not known:
        return None
    x, y = near_axis([ttft for _, ttft, _ in known], "TTFT p95"), near_axis([itl for *_, itl in known], "ITL p99")
    plot = Plot(x, y, height=360)
    for name, style in _styled(members):
        points = [(ttft, itl) for member, ttft, itl in known if member.policy == name]
        titles = [member.line() for member, *_ in known if member.policy == name]
        plot.line(points, style, name if len(points) > 1 else "")
        plot.points(points, style, name if len(points) == 1 else "", radius=3.5, titles=titles)
        for member, ttft, itl in known:
            if member.policy == name:
                plot.text((ttft, itl), f"{member.value:g}")
    reading = (
        "Newcomers wait on one axis, everybody else on the other. Lower left is better; each line is a policy, from "
        "its lightest to its heaviest load."
    )
    return Figure("First token against the rest", reading, plot.render("TTFT against ITL by policy"))


def _by_load(members: Sequence[Member], unit: str, metric: str, q: float, caption: str) -> Figure | None:
    lines: dict[str, list[Point]] = {}
    for member in members:
        value = member.latency(metric, q)
        if value is not None:
            lines.setdefault(member.policy, []).append((member.value, value))
    if not any(len(points) > 1 for points in lines.values()):
        return None
    every = [value for points in lines.values() for _, value in points]
    plot = Plot(_load_axis(members, unit), time_axis(every, f"{metric.upper()} p{q:g}"))
    for name, style in _styled(members):
        plot.line(lines.get(name, []), style, name)
        plot.points(lines.get(name, []), style, radius=3)
    return Figure(caption, "Where a line turns up, queues begin to grow.", plot.render(caption))


def _goodput(members: Sequence[Member], unit: str) -> Figure | None:
    if not members or not members[0].analysis.run.goodput.slos or len({m.value for m in members}) < 2:
        return None
    plot = Plot(_load_axis(members, unit), Axis.linear(0.0, 1.0, "goodput", share))
    for name, style in _styled(members):
        found = [(m.value, m.analysis.run.goodput.share) for m in members if m.policy == name]
        points = [(value, part) for value, part in found if part is not None]
        plot.line(points, style, name)
        plot.points(points, style, radius=3)
    reading = "Share of all sent requests that met every objective."
    return Figure("Goodput by load", reading, plot.render("Goodput by load"))


def _load_axis(members: Sequence[Member], unit: str) -> Axis:
    return Axis.linear(0.0, max(member.value for member in members), unit)


def _styled(members: Sequence[Member]) -> list[tuple[str, str]]:
    names = dict.fromkeys(member.policy for member in members)
    return [(name, STYLES[i % len(STYLES)]) for i, name in enumerate(names)]
