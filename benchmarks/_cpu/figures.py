"""Pictures of what was measured, from the stored results alone: PNG by matplotlib, and the same points as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _interference.figures import subplots

from _cpu import inprocess, served
from _cpu.bench import Bench
from _cpu.models import DEFAULT
from _cpu.systems import MIXED, SERVED, SLO, SYSTEMS

Points = dict[str, Any]


def write(bench: Bench, folder: Path) -> list[Path]:
    """`cpu_NAME.png` and `.json` of every figure there are results for; the files. Without matplotlib, JSON alone."""
    written: list[Path] = []
    make = subplots()
    for name, (collect, draw) in FIGURES.items():
        points = collect(bench)
        if not points:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / f"cpu_{name}.json"
        data.write_text(json.dumps(points, indent=1) + "\n")
        written.append(data)
        if make is not None:
            figure, ax = make(figsize=(8, 5), layout="constrained")
            draw(ax, points)
            figure.savefig(data.with_suffix(".png"), dpi=120)
            written.append(data.with_suffix(".png"))
    return written


def scaling(bench: Bench) -> Points:
    """Medians of a step's milliseconds by streams, and what the limits allow."""
    found: Points = {}
    for name, steps in inprocess.step_costs(bench).items():
        row = {"streams": list(steps), "ms": [1e3 * statistics.median(one) for one in steps.values()]}
        if SYSTEMS[name].ours:
            row["roofline_ms"] = [1e3 * inprocess.roofline_s(bench, SYSTEMS[name], streams) for streams in steps]
        found[name] = row
    return found


def draw_scaling(ax: Any, points: Points) -> None:
    """Solid: measured; dotted: the roofline of ours."""
    for number, (name, row) in enumerate(points.items()):
        ax.plot(row["streams"], row["ms"], marker="o", color=f"C{number}", label=name)
        if "roofline_ms" in row:
            ax.plot(row["streams"], row["roofline_ms"], linestyle=":", color=f"C{number}")
    ax.set(xscale="log", yscale="log", xlabel="streams in a step", ylabel="ms a step")
    ax.set_title("A step's cost (dotted: the least that memory and multiplications allow)")
    ax.legend(fontsize=8)


def totals(bench: Bench) -> Points:
    """Medians of the output through HTTP by streams."""
    found: Points = {}
    for name in SERVED:
        rates = {count: served.served_rates(bench, DEFAULT, name, count) for count in bench.size.served}
        row = {count: statistics.median(values) for count, values in rates.items() if values}
        if row:
            found[name] = {"streams": list(row), "tokens_per_s": list(row.values())}
    return found


def draw_totals(ax: Any, points: Points) -> None:
    """A line each."""
    for name, row in points.items():
        mine = SYSTEMS[name].ours
        ax.plot(row["streams"], row["tokens_per_s"], marker="o", linewidth=2.5 if mine else 1.2, label=name)
    ax.set(xscale="log", xlabel="streams", ylabel="output tokens/s, all streams", ylim=(0, None))
    ax.set_title("Served: 100 tokens in, 128 out, through HTTP")
    ax.legend(fontsize=8)


def mixed(bench: Bench) -> Points:
    """p99 gap and median time to first token of each repeat."""
    rows = {one.name: bench.values("mixed", one.name) for one in MIXED}
    return {
        name: {"itl_p99_ms": [1e3 * row["itl_p99_s"] for row in found], "ttft_p50_s": [r["ttft_p50_s"] for r in found]}
        for name, found in rows.items()
        if found
    }


def draw_mixed(ax: Any, points: Points) -> None:
    """Lower and further left is better."""
    for name, row in points.items():
        ax.scatter(row["itl_p99_ms"], row["ttft_p50_s"], label=name, s=60 if name.startswith("paceline") else 30)
    ax.axvline(SLO["itl_ms"], color="grey", linestyle="--", linewidth=1)
    ax.axhline(SLO["ttft_ms"] / 1e3, color="grey", linestyle="--", linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="p99 gap of eight streams, ms", ylabel="newcomers' median TTFT, s")
    ax.set_title("A prompt of 2,000 tokens every 10 s beside eight streams")
    ax.legend(fontsize=8)


FIGURES: dict[str, tuple[Callable[[Bench], Points], Callable[[Any, Points], None]]] = {
    "scaling": (scaling, draw_scaling),
    "served": (totals, draw_totals),
    "mixed": (mixed, draw_mixed),
}
