"""Is B faster than A? Paired runs in ABBA order, or two saved runs.

    cells = plan_cells(pairs=6, aa_pairs=2, seed=0)      # A B, B A, A B ... then A A, B B
    for cell in cells: run it (same seed, same arrivals, same prompts within a pair; cold or primed cache as stated)
    compare_cells(results)

Two saved runs are one pair: nobody knows how much a repetition would differ, so their interval comes from resampling
time blocks within the runs, and the noise floor from the halves of each run. The report says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.measure import stats
from paceline.measure.gate_parser import Gate, parse_gate
from paceline.measure.gates import measured_quantile, plain_value
from paceline.measure.metrics import RequestMetrics, value_of
from paceline.measure.paired import Change, RatioEstimate, compare_pairs, decide
from paceline.measure.summary import RunMetrics, collect, infinities_per_failure
from paceline.measure.verdict import Outcome

Arm = Literal["A", "B"]
# (name, higher is faster, counts toward the verdict). Percentiles have failures as +inf.
STATISTICS: tuple[tuple[str, bool, bool], ...] = (
    ("p50 ttft", False, True),
    ("p95 ttft", False, False),
    ("p99 ttft", False, False),
    ("p50 itl", False, True),
    ("p95 itl", False, False),
    ("p99 itl", False, False),
    ("p50 tpot", False, False),
    ("p50 e2e", False, True),
    ("p95 e2e", False, False),
    ("request_throughput", True, False),
    ("output_throughput", True, False),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a comparison. The two cells of a pair share everything but the arm."""

    pair: int
    position: int  # 0 runs first
    arm: Arm
    seed: int
    same_arm: bool  # a pair of one arm with itself: it measures the noise

    @property
    def name(self) -> str:
        return f"{'aa' if self.same_arm else 'pair'}{self.pair:02d}.{self.position}{self.arm}"


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    run: RunMetrics
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Row:
    """One statistic of both arms."""

    name: str
    decides: bool
    a: float | None  # median over runs, or the saved run's value
    b: float | None
    ratio: RatioEstimate


@dataclass(frozen=True, slots=True)
class Deltas:
    """Second view: the same request (by id) under both arms, B - A, in seconds; successful in both."""

    metric: str
    n: int
    p10: float | None
    median: float | None
    p90: float | None
    b_faster_share: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    verdict: Change
    why: str
    rows: tuple[Row, ...]
    deltas: tuple[Deltas, ...]
    pairs: int
    aa_pairs: int
    smallest_effect: float
    cache: str  # as stated by who ran it: "cold", "primed", "unknown"
    dropped: tuple[str, ...] = ()  # cells that were INVALID, and their pairs with them
    saved: bool = False  # two saved runs, not repeated pairs
    name_a: str = "A"
    name_b: str = "B"

    @property
    def exit_code(self) -> int:
        """0 not slower, 1 slower, 2 undecided."""
        return {Change.FASTER: 0, Change.SAME: 0, Change.SLOWER: 1}.get(self.verdict, 2)


def plan_cells(pairs: int, aa_pairs: int = 2, seed: int = 0) -> list[Cell]:
    """Cells in the order they run: AB, BA, AB, ..., then AA, BB, ... for the noise floor."""
    cells: list[Cell] = []
    for pair in range(pairs):
        order: tuple[Arm, Arm] = ("A", "B") if pair % 2 == 0 else ("B", "A")
        cells += [Cell(pair, position, arm, seed + pair, same_arm=False) for position, arm in enumerate(order)]
    for pair in range(aa_pairs):
        arm: Arm = "A" if pair % 2 == 0 else "B"
        cells += [Cell(pair, position, arm, seed + pairs + pair, same_arm=True) for position in (0, 1)]
    return cells


def statistic(name: str, run: RunMetrics) -> float | None:
    """The value of one of `STATISTICS`, or of the left side of any gate."""
    gate = _gate_of(name)
    return measured_quantile(gate, run).value if gate.kind == "percentile" else plain_value(gate, run)


def _gate_of(name: str) -> Gate:
    return parse_gate(f"{name} >= 0" if name.endswith("throughput") else f"{name} <= 0s")


def compare_cells(
    results: Sequence[CellResult],
    *,
    smallest_effect: float = 0.03,
    cache: str = "unknown",
    name_a: str = "A",
    name_b: str = "B",
) -> Comparison:
    """Verdict over repeated pairs. A pair with an INVALID cell is dropped, and named."""
    by_pair: dict[tuple[bool, int], list[CellResult]] = {}
    for result in results:
        by_pair.setdefault((result.cell.same_arm, result.cell.pair), []).append(result)
    whole = {key: pair for key, pair in by_pair.items() if len(pair) == 2}
    bad = [r.cell.name for pair in by_pair.values() for r in pair if r.outcome is Outcome.INVALID]
    bad += [pair[0].cell.name for pair in by_pair.values() if len(pair) == 1]
    kept = {key: pair for key, pair in whole.items() if all(r.outcome is not Outcome.INVALID for r in pair)}
    ab = [sorted(pair, key=lambda r: r.cell.arm) for (same, _), pair in kept.items() if not same]
    aa = [sorted(pair, key=lambda r: r.cell.position) for (same, _), pair in kept.items() if same]
    rows = []
    for name, higher, decides in STATISTICS:
        values = [(statistic(name, a.run), statistic(name, b.run)) for a, b in ab]
        noise = [(statistic(name, a.run), statistic(name, b.run)) for a, b in aa]
        ratio = compare_pairs(
            _numbers(values), _numbers(noise), smallest_effect=smallest_effect, higher_is_faster=higher
        )
        medians = [stats.percentile([v for v in side if v is not None], 50.0) for side in zip(*values, strict=True)]
        a, b = medians or (None, None)
        rows.append(Row(name, decides, a, b, ratio))
    verdict, why = _overall(rows, name_b)
    deltas = _deltas([(a.run, b.run) for a, b in ab])
    return Comparison(
        verdict, why, tuple(rows), deltas, len(ab), len(aa), smallest_effect, cache, tuple(bad), False, name_a, name_b
    )


def _numbers(pairs: Sequence[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """Undefined becomes NaN, which no pair statistic accepts: the pair counts as one without a value."""
    return [(math.nan if a is None else a, math.nan if b is None else b) for a, b in pairs]


def _overall(rows: Sequence[Row], who: str) -> tuple[Change, str]:
    """All deciding statistics the same: same. Some faster, none slower: faster. Mixed or unclear: undecided."""
    deciding = [row for row in rows if row.decides]
    found: dict[Change, list[str]] = {}
    for row in deciding:
        found.setdefault(row.ratio.verdict, []).append(row.name)
    better, worse = found.get(Change.FASTER, []), found.get(Change.SLOWER, [])
    if better and worse:
        return Change.UNDECIDED, f"{who} is faster in {', '.join(better)} and slower in {', '.join(worse)}: a trade"
    if worse:
        return Change.SLOWER, f"{who} is slower in {', '.join(worse)}"
    open_ones = found.get(Change.UNDECIDED, [])
    if better and not open_ones:
        return Change.FASTER, f"{who} is faster in {', '.join(better)} and in none slower"
    if not open_ones:
        return Change.SAME, f"{', '.join(row.name for row in deciding)}: all the same"
    first = next(row for row in deciding if row.ratio.verdict is Change.UNDECIDED)
    lead = f"{who} is faster in {', '.join(better)}, but " if better else ""
    return Change.UNDECIDED, f"{lead}{', '.join(open_ones)} undecided: {first.ratio.why}"


def _deltas(pairs: Sequence[tuple[RunMetrics, RunMetrics]]) -> tuple[Deltas, ...]:
    rows = []
    for metric in ("ttft", "tpot", "e2e"):
        differences: list[float] = []
        for a, b in pairs:
            theirs = {request.record.id: request for request in a.requests}
            for request in b.requests:
                old = theirs.get(request.record.id)
                before = None if old is None else value_of(metric, old)
                after = value_of(metric, request)
                if before is not None and after is not None:
                    differences.append(after - before)
        differences.sort()
        p10, p50, p90 = (stats.percentile_of_sorted(differences, q) for q in (10.0, 50.0, 90.0))
        share = sum(d < 0.0 for d in differences) / len(differences) if differences else None
        rows.append(Deltas(metric, len(differences), p10, p50, p90, share))
    return tuple(rows)


# ---- two saved runs ----


def compare_saved(
    a: RunMetrics,
    b: RunMetrics,
    *,
    smallest_effect: float = 0.03,
    cache: str = "unknown",
    name_a: str = "A",
    name_b: str = "B",
    draws: int = 400,
) -> Comparison:
    """Verdict over one run of each arm, from time blocks; blocks are drawn alike where both ran one schedule."""
    aligned = _same_schedule(a, b)
    rows = []
    for name, higher, decides in STATISTICS:
        ratio = _saved_ratio(name, a, b, aligned, smallest_effect, higher, draws)
        rows.append(Row(name, decides, statistic(name, a), statistic(name, b), ratio))
    verdict, why = _overall(rows, name_b)
    why += "; one run each, so differences from run to run are not in the interval"
    deltas = _deltas([(a, b)]) if aligned else ()
    return Comparison(verdict, why, tuple(rows), deltas, 1, 0, smallest_effect, cache, (), True, name_a, name_b)


def _same_schedule(a: RunMetrics, b: RunMetrics) -> bool:
    def times(run: RunMetrics) -> dict[str, float]:
        return {request.record.id: request.record.scheduled_s for request in run.requests if request.record.turn == 0}

    return times(a) == times(b)


def _saved_ratio(
    name: str, a: RunMetrics, b: RunMetrics, aligned: bool, smallest_effect: float, higher: bool, draws: int
) -> RatioEstimate:
    before, after = statistic(name, a), statistic(name, b)
    if before is None or after is None or not (0.0 < before < math.inf and 0.0 < after < math.inf):
        return RatioEstimate(1, None, None, None, None, None, Change.UNDECIDED, "no finite value on one side")
    middle = math.log(after / before)
    gate = _gate_of(name)
    if gate.kind != "percentile":
        why = "one figure for each run, without an interval"
        return RatioEstimate(1, math.exp(middle), None, None, None, None, Change.UNDECIDED, why)
    blocks_a, blocks_b = _blocks(gate, a), _blocks(gate, b)
    if min(len(blocks_a), len(blocks_b)) < 6:
        why = f"runs under {6 * stats.BLOCK_S:g} s give too few time blocks for an interval"
        return RatioEstimate(1, math.exp(middle), None, None, None, None, Change.UNDECIDED, why)
    assert gate.q is not None
    halves = _half_ratios(gate.q, blocks_a) + _half_ratios(gate.q, blocks_b)
    low, high = _resample(gate.q, blocks_a, blocks_b, aligned and len(blocks_a) == len(blocks_b), draws)
    noise = math.exp(max(halves)) if halves else None
    verdict, why = decide(low, middle, high, noise, smallest_effect, higher)
    return RatioEstimate(1, math.exp(middle), math.exp(low), math.exp(high), None, noise, verdict, why)


def _blocks(gate: Gate, run: RunMetrics) -> list[list[float]]:
    """Values per time block of the schedule, failures and undefined as +inf."""
    values, giving, _, _ = collect(gate.metric, run.judged)
    weight = infinities_per_failure(gate.metric, values, giving)
    times = [request.record.scheduled_s for request in run.judged]
    groups = [[run.judged[i] for i in block] for block in stats.time_blocks(times)]
    return [_values(gate, group, weight) for group in groups]


def _values(gate: Gate, requests: Sequence[RequestMetrics], weight: int) -> list[float]:
    values, _, undefined, _ = collect(gate.metric, requests)
    missing = undefined + sum(not request.ok for request in requests)
    return values + [math.inf] * (missing * weight)


def _pooled(q: float, blocks: Sequence[Sequence[float]]) -> float | None:
    value = stats.percentile([value for block in blocks for value in block], q)
    return value if value is not None and 0.0 < value < math.inf else None


def _half_ratios(q: float, blocks: Sequence[Sequence[float]]) -> list[float]:
    """|log ratio| between the even and the odd time blocks of one run: its own A/A."""
    even, odd = _pooled(q, blocks[::2]), _pooled(q, blocks[1::2])
    return [] if even is None or odd is None else [abs(math.log(odd / even))]


def _resample(
    q: float, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], aligned: bool, draws: int
) -> tuple[float, float]:
    """95 % interval of the log ratio; infinite where failures reach the percentile in too many draws."""
    rng = random.Random(0)  # noqa: S311 - resampling, not a secret
    logs: list[float] = []
    for _ in range(draws):
        chosen = rng.choices(range(len(a)), k=len(a))
        before = _pooled(q, [a[i] for i in chosen])
        others = chosen if aligned else rng.choices(range(len(b)), k=len(b))
        after = _pooled(q, [b[i] for i in others])
        if before is not None and after is not None:
            logs.append(math.log(after / before))
    if len(logs) < 0.975 * draws:
        return -math.inf, math.inf
    low, high = stats.percentile(logs, 2.5), stats.percentile(logs, 97.5)
    assert low is not None
    assert high is not None
    return low, high
