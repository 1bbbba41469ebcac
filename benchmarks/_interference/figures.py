"""Pictures of what was measured, from the stored results alone: PNG by matplotlib, and the same points as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _interference import streams
from _interference.bench import Bench
from _interference.burst import BURST
from _interference.judge import at, finite
from _interference.tenants import POLICIES
from _interference.variants import SLO

Points = dict[str, Any]


def write(bench: Bench) -> list[Path]:
    """Every figure that there are results for; the files written. Without matplotlib, JSON alone."""
    written = []
    axes = subplots()
    for name, (collect, draw) in FIGURES.items():
        points = collect(bench)
        if not points:
            continue
        data = bench.state.folder / f"figure-{name}.json"
        data.write_text(json.dumps(finite(points), indent=1) + "\n")
        written.append(data)
        if axes is not None:
            picture = data.with_suffix(".png")
            figure, ax = axes(figsize=(8, 5), layout="constrained")
            draw(ax, points, bench)
            figure.savefig(picture, dpi=120)
            written.append(picture)
    if axes is None and written:
        bench.report.note("figures", "as JSON alone; for PNG: pip install matplotlib")
    return written


def subplots() -> Callable[..., Any] | None:
    """matplotlib's `subplots` on a canvas without a screen."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots


def frontier(bench: Bench) -> Points:
    """p99 ITL and p95 TTFT of each variant: of the runs in turns, else of the one run."""
    scenario, found = bench.scenario, {}
    for variant in bench.variants:
        once = bench.known([f"sweep {variant.name}"])
        rows = streams.told_rounds(bench, variant.name) or list(once.values())
        if rows:
            found[variant.name] = {
                "itl_p99_over_target": [row["itl_p99_s"] / scenario.itl_s for row in rows],
                "ttft_p95_s": [row["ttft_p95_s"] for row in rows],
            }
    return found


def draw_frontier(ax: Any, points: Points, bench: Bench) -> None:
    """Left of the line the promise holds; lower is better for newcomers."""
    for name, row in points.items():
        xs, ys = row["itl_p99_over_target"], row["ttft_p95_s"]
        mine = name == SLO.name
        ax.scatter(xs, ys, s=70 if mine else 25, marker="*" if mine else "o", zorder=3 if mine else 2)
        ax.annotate(name, (at(xs, 50), at(ys, 50)), textcoords="offset points", xytext=(5, 3), fontsize=7)
    ax.axvline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="p99 ITL of eight streams / target", ylabel="p95 TTFT of newcomers, s")
    ax.set_title(f"A prompt of {bench.size.long_in} tokens every {bench.scenario.period_s:.2g} s beside eight streams")


def capacities(bench: Bench) -> Points:
    """Rates; None is no capacity."""
    names = [SLO.name, *(variant.name for variant in bench.rivals())]
    found = bench.known(f"capacity {name}" for name in names)
    return {key.removeprefix("capacity "): row["rate"] for key, row in found.items()}


def draw_capacities(ax: Any, points: Points, bench: Bench) -> None:
    """A bar each."""
    bars = ax.bar(list(points), [rate or 0.0 for rate in points.values()])
    ax.bar_label(bars, [f"{rate:.3g}" if rate else "none" for rate in points.values()])
    ax.tick_params(axis="x", labelrotation=20)
    ax.set(ylabel="requests/s", title="Highest rate with 95 % of requests inside both targets")


def bursts(bench: Bench) -> Points:
    """Attainment over time."""
    names = [SLO.name, *(variant.name for variant in bench.rivals())]
    found = bench.known(f"burst {name}" for name in names)
    return {key.removeprefix("burst "): row for key, row in found.items()}


def draw_bursts(ax: Any, points: Points, bench: Bench) -> None:
    """A line each, the burst shaded."""
    for name, row in points.items():
        if row["attainment"]:
            ax.plot(*zip(*row["attainment"], strict=True), label=name, linewidth=2.5 if name == SLO.name else 1.2)
    row = next(iter(points.values()))
    ax.axvspan(row["begins_s"], row["ends_s"], color="orange", alpha=0.2, label="burst")
    ax.axhline(0.95, color="grey", linestyle="--", linewidth=1)
    ax.set(
        xlabel="s", ylabel=f"share inside their targets, of {bench.size.window} requests in a row", ylim=(-0.02, 1.02)
    )
    ax.set_title(f"{row['full_load']['rate'] * BURST:.2g} requests/s for {row['ends_s'] - row['begins_s']:.0f} s")
    ax.legend(fontsize=8)


def tenants(bench: Bench) -> Points:
    """Times to first token of the tenant who does not flood."""
    found = bench.known(f"tenants {name}" for name in POLICIES)
    return {key.removeprefix("tenants "): row for key, row in found.items()}


def draw_tenants(ax: Any, points: Points, bench: Bench) -> None:
    """The distribution alone and flooded, by policy."""
    for number, (name, row) in enumerate(points.items()):
        for kind, style in (("alone", ":"), ("flooded", "-")):
            values = sorted(row[f"{kind}_s"])
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            ax.step(values, shares, linestyle=style, color=f"C{number}", where="post", label=f"{name}, {kind}")
    ax.axhline(0.95, color="grey", linestyle="--", linewidth=1)
    ax.set(xscale="log", xlabel="time to first token of the quiet tenant, s", ylabel="share of its requests")
    ax.set_title("Two tenants, one flooding")
    ax.legend(fontsize=8)


FIGURES: dict[str, tuple[Callable[[Bench], Points], Callable[[Any, Points, Bench], None]]] = {
    "frontier": (frontier, draw_frontier),
    "capacity": (capacities, draw_capacities),
    "burst": (bursts, draw_bursts),
    "tenants": (tenants, draw_tenants),
}
