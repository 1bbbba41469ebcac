"""Comparisons: the order of runs, verdicts over pairs, verdicts over two saved runs."""

from __future__ import annotations

import math
import random

import pytest

from paceline.measure.compare import CellResult, Comparison, compare_cells, compare_saved, plan_cells, statistic
from paceline.measure.paired import Change
from paceline.measure.summary import RunMetrics, measure_run
from paceline.measure.verdict import Outcome
from tests.measure.making import run_of


def run(scale: float, seed: int, noise: float = 0.005, n: int = 80) -> RunMetrics:
    """A run whose every latency is `scale` times the seed's; `noise` is what differs between repetitions."""
    shape = random.Random(seed)
    level = scale * (1 + noise * random.Random(hash((seed, scale))).uniform(-1, 1))
    return run_of([level * (100 + 30 * shape.random()) for _ in range(n)], itl_ms=level * 20, every_s=0.5)


def campaign(scale_b: float, pairs: int = 6, aa: int = 2, outcome: Outcome = Outcome.PASS) -> Comparison:
    results = []
    for cell in plan_cells(pairs, aa, seed=7):
        bad = outcome if cell.name == "pair02.1A" or cell.name == "pair02.1B" else Outcome.PASS
        scale = scale_b if cell.arm == "B" else 1.0
        wobble = 1.0 + 0.002 * cell.position if cell.same_arm else 1.0
        results.append(CellResult(cell, run(scale * wobble, cell.seed), bad))
    return compare_cells(results, cache="cold")


def test_cells_alternate_and_pairs_share_their_seed() -> None:
    cells = plan_cells(4, 2, seed=10)
    assert "".join(cell.arm for cell in cells) == "ABBAABBA" + "AABB"
    assert [cell.seed for cell in cells] == [10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15]
    assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("scale", "verdict", "code"),
    [(0.8, Change.FASTER, 0), (1.25, Change.SLOWER, 1), (1.0, Change.SAME, 0)],
)
def test_verdict(scale: float, verdict: Change, code: int) -> None:
    found = campaign(scale)
    assert (found.verdict, found.exit_code) == (verdict, code), found.why
    row = next(row for row in found.rows if row.name == "p50 ttft")
    assert row.ratio.median == pytest.approx(scale, rel=0.02)
    assert row.ratio.low is not None
    assert row.ratio.high is not None
    assert row.ratio.low <= scale * 1.01
    assert row.ratio.high >= scale * 0.99
    assert found.cache == "cold"


def test_paired_deltas_of_the_same_requests() -> None:
    ttft = next(d for d in campaign(0.8).deltas if d.metric == "ttft")
    assert ttft.n == 6 * 80
    assert ttft.b_faster_share == 1.0
    assert ttft.median == pytest.approx(-0.023, abs=0.004)


def test_too_few_pairs_and_invalid_cells() -> None:
    assert campaign(0.8, pairs=5).verdict is Change.UNDECIDED
    assert campaign(0.8, aa=0).verdict is Change.UNDECIDED
    dropped = campaign(0.8, outcome=Outcome.INVALID)
    assert dropped.pairs == 5
    assert dropped.dropped == ("pair02.1B",)
    assert (dropped.verdict, dropped.exit_code) == (Change.UNDECIDED, 2)
    assert compare_cells([]).verdict is Change.UNDECIDED


def test_failures_reach_the_comparison() -> None:
    results = []
    for cell in plan_cells(6, 2):
        broken = cell.arm == "B" and not cell.same_arm
        ttft = [math.inf if broken and i % 2 else 100.0 for i in range(60)]
        results.append(CellResult(cell, run_of(ttft), Outcome.PASS))
    found = compare_cells(results)
    assert found.verdict is Change.UNDECIDED
    assert "finite" in found.why


def test_a_trade_is_no_win() -> None:
    results = []
    for cell in plan_cells(6, 2):
        better, worse = (0.7, 1.4) if cell.arm == "B" and not cell.same_arm else (1.0, 1.0)
        wobble = 1 + 0.002 * cell.position
        results.append(
            CellResult(cell, run_of([100 * better * wobble] * 60, itl_ms=20 * worse * wobble, tokens=3), Outcome.PASS)
        )
    found = compare_cells(results)
    assert found.verdict is Change.UNDECIDED
    assert "trade" in found.why


@pytest.mark.parametrize(("scale", "verdict"), [(0.7, Change.FASTER), (1.4, Change.SLOWER), (1.0, Change.SAME)])
def test_two_saved_runs(scale: float, verdict: Change) -> None:
    found = compare_saved(run(1.0, 3, 0.0, n=160), run(scale, 3, 0.0, n=160))
    assert found.verdict is verdict, found.why
    assert "one run each" in found.why
    assert next(d for d in found.deltas if d.metric == "ttft").n == 160


def test_saved_runs_too_short_or_on_other_schedules() -> None:
    short = compare_saved(run(1.0, 3, n=10), run(0.5, 3, n=10))
    assert short.verdict is Change.UNDECIDED
    other = compare_saved(run(1.0, 3, 0.0, n=160), run(0.7, 4, 0.0, n=150))
    assert other.deltas == ()
    assert other.verdict is Change.FASTER
    assert compare_saved(measure_run([]), run(1.0, 3)).verdict is Change.UNDECIDED


def test_statistics_have_failures_as_infinity() -> None:
    assert statistic("p95 ttft", run_of([100.0, math.inf])) == math.inf
    assert statistic("p95 ttft", measure_run([])) is None
    assert statistic("output_throughput", measure_run([])) is None
