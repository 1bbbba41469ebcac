"""What was asked for, and whether it was reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _cpu import inprocess, served, starts
from _cpu.bench import Bench
from _cpu.models import DEFAULT, RANDOM, Shape
from _cpu.systems import LARGE_SERVED, SERVED, SLO, SYSTEMS

MIXED_TTFT_S = 5.0
PEERS = [name for name, system in SYSTEMS.items() if not system.ours]


@dataclass(frozen=True)
class Target:
    """One line of the table: what was measured against what was asked."""

    name: str
    found: float | None  # None: not measured
    asked: float
    at_most: bool = False
    unit: str = "x"

    @property
    def verdict(self) -> str:
        """Whether it was reached, and by how much it was missed or passed."""
        if self.found is None:
            return "not measured"
        share = self.found / self.asked
        reached = share <= 1 if self.at_most else share >= 1
        return f"{'reached' if reached else 'MISSED'} ({abs(share - 1):.0%} {'above' if share > 1 else 'below'})"


def tell(bench: Bench) -> None:
    """The table; as notes, so that they are in the JSON too."""
    print(f"\n{'target':<74}{'asked':>12}{'found':>12}  verdict")
    rows = []
    for target in targets(bench):
        found = "-" if target.found is None else f"{target.found:.3g}"
        asked = f"{'<=' if target.at_most else '>='} {target.asked:g} {target.unit}"
        print(f"{target.name:<74}{asked:>12}{found:>12}  {target.verdict}")
        rows.append({"name": target.name, "asked": asked, "found": target.found, "verdict": target.verdict})
    bench.report.note("targets", rows, show=False)


def targets(bench: Bench) -> Iterator[Target]:
    """In the order of docs/cpu.md. Medians, and ratios of medians."""
    for shape in (DEFAULT, *RANDOM):
        yield from _alone(bench, shape)
        yield from _served(bench, shape)
    yield from _rest(bench)


def _alone(bench: Bench, shape: Shape) -> Iterator[Target]:
    def single(name: str) -> float | None:
        return _median(inprocess.single_rates(bench, shape, name))

    def prefill(name: str) -> float | None:
        seconds = _median(inprocess.prefill_seconds(bench, shape, name))
        return None if seconds is None else bench.size.prefill / seconds

    def of_memory(name: str) -> float | None:
        return _median(inprocess.fractions_of_memory(bench, shape, SYSTEMS[name]))

    def of_products(name: str) -> float | None:
        return _median(inprocess.fractions_of_products(bench, shape, SYSTEMS[name]))

    at = shape.name
    yield Target(f"{at}: one stream, int8, of the memory limit", of_memory("paceline int8"), 0.6)
    ratio = _over(single("paceline int8"), single("llama.cpp Q8_0"))
    yield Target(f"{at}: one stream, int8 over llama.cpp Q8_0", ratio, 1.5)
    ratio = _over(single("paceline int4"), single("llama.cpp Q4_1"))
    yield Target(f"{at}: one stream, int4 over llama.cpp Q4_1", ratio, 1.5)
    yield Target(f"{at}: one stream, int4, of the memory limit (stretch)", of_memory("paceline int4"), 0.5)
    for kind in ("int8", "float32"):
        yield Target(f"{at}: prefill, {kind}, of the {kind} limit", of_products(f"paceline {kind}"), 0.7)
    ratio = _over(prefill("paceline int8"), prefill("llama.cpp Q8_0"))
    yield Target(f"{at}: prefill, int8 over llama.cpp Q8_0", ratio, 1.5)
    ratio = _over(prefill("paceline float32"), prefill("llama.cpp F16"))
    yield Target(f"{at}: prefill, float32 over llama.cpp F16", ratio, 1.0)


def _served(bench: Bench, shape: Shape) -> Iterator[Target]:
    counts = bench.size.served if shape is DEFAULT else bench.size.large_served
    names = SERVED if shape is DEFAULT else LARGE_SERVED

    def best(count: int, *, ours: bool) -> float | None:
        rates = [_median(served.served_rates(bench, shape, n, count)) for n in names if SYSTEMS[n].ours is ours]
        return max((rate for rate in rates if rate is not None), default=None)

    at, middle, most = shape.name, 16 if 16 in counts else counts[-1], counts[-1]
    ratio = _over(best(middle, ours=True), best(middle, ours=False))
    yield Target(f"{at}: output at {middle} streams over the best peer (stretch 2.5)", ratio, 2.0)
    if most != middle:
        ratio = _over(best(most, ours=True), best(middle, ours=True))
        yield Target(f"{at}: output at {most} streams over that at {middle}", ratio, 1.0)


def _rest(bench: Bench) -> Iterator[Target]:
    steps = inprocess.step_costs(bench)
    few, many = bench.size.scaling[0], bench.size.scaling[-1]
    for name, costs in steps.items():
        if SYSTEMS[name].ours and few in costs and many in costs:
            grows = _median(inprocess.growth(costs, few, many))
            work = inprocess.roofline_s(bench, SYSTEMS[name], many) / inprocess.roofline_s(bench, SYSTEMS[name], few)
            yield Target(
                f"{name}: step of {many} over step of {few}, over the roofline's growth", _over(grows, work), 1.0, True
            )
    rows = bench.values("mixed", "paceline int8, slo")
    itl = _median([1e3 * row["itl_p99_s"] for row in rows])
    yield Target("mixed, slo: p99 gap of the streams", itl, SLO["itl_ms"], True, "ms")
    yield Target(
        "mixed, slo: newcomers' median TTFT", _median([r["ttft_p50_s"] for r in rows]), MIXED_TTFT_S, True, "s"
    )
    ratio = _median(starts.memory_ratios(bench, "paceline int8"))
    yield Target("memory beyond imports over weights + KV", ratio, 1.3, True)
    seconds = _median(starts.start_seconds(bench, "paceline int8"))
    yield Target("second start to first token (stretch 2)", seconds, 4.0, True, "s")


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _over(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs
