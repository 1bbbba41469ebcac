"""Does a run keep its promises? One statistical test per gate; nothing passes that was not shown.

    PASS        shown at 95 % confidence: so few violations that the promise holds beyond this run's luck
    FAIL        shown at 95 % confidence, or there is nothing to judge (fail closed)
    UNDECIDED   the run is too short, or too near the bound, to say either

A percentile gate counts violations: `p95 ttft <= 500ms` says that at most 5 % of requests may be over, which a
binomial test judges without assuming any distribution. A failed request is a violation, so is one whose metric is
undefined; one to which the metric does not apply is left out. Requests wait in the same queues, so violations come in
clusters: PASS is tested with the effective number of requests, n (1 - rho) / (1 + rho), FAIL with n, both to the
disadvantage of the server. Several gates hold together with less confidence than each; `joint_confidence` says how
much is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import ConfigError
from paceline.measure import stats
from paceline.measure.distributions import binomial_cdf
from paceline.measure.gate_parser import Gate, format_bound, format_value, parse_gate
from paceline.measure.metrics import POOLED, RequestMetrics, applies, pooled_of, value_of
from paceline.measure.records import ErrorClass
from paceline.measure.slo import goodput
from paceline.measure.summary import Rate, RunMetrics, collect, infinities_per_failure

__all__ = ["Gate", "GateResult", "Status", "evaluate", "evaluate_all", "joint_confidence", "parse_gate"]

ALPHA = 0.05


class Status(StrEnum):
    PASS = "PASS"  # noqa: S105 - a verdict
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate's answer with everything needed to check it by hand."""

    gate: Gate
    status: Status
    why: str
    value: float | None  # measured, in the gate's unit; +inf where failures reach the percentile
    bound: float | None  # absolute; None where the baseline lacks it
    n: int = 0
    violations: int | None = None
    low: float | None = None
    high: float | None = None
    too_few: bool = False  # n is below the smallest that could show it

    @property
    def value_text(self) -> str:
        return format_value(self.value, self.gate.unit)

    @property
    def bound_text(self) -> str:
        if self.bound is None or not self.gate.bound.relative:
            return format_bound(self.gate.bound, self.gate.unit)
        return f"{format_value(self.bound, self.gate.unit)} ({format_bound(self.gate.bound, self.gate.unit)})"


def joint_confidence(gates: Sequence[Gate]) -> float:
    """Lower bound (Bonferroni) of the confidence that every gate's answer is right."""
    return max(0.0, 1.0 - ALPHA * len(gates))


def evaluate_all(gates: Sequence[Gate], run: RunMetrics, baseline: RunMetrics | None = None) -> list[GateResult]:
    return [evaluate(gate, run, baseline) for gate in gates]


def evaluate(gate: Gate, run: RunMetrics, baseline: RunMetrics | None = None) -> GateResult:
    """Judge one gate. ConfigError: it needs a baseline or objectives that were not given."""
    if gate.bound.relative and baseline is None:
        raise ConfigError(f"{gate.text!r} needs a baseline run; give one with --baseline DIR")
    own = _of_class(gate, run)
    if own is None:
        return GateResult(gate, Status.FAIL, f"no request of class {gate.traffic_class!r} was sent", None, None)
    if gate.bound.relative:
        assert baseline is not None
        return _against_baseline(gate, own, _of_class(gate, baseline))
    assert gate.bound.value is not None
    if gate.kind == "percentile":
        return _percentile(gate, own, gate.bound.value)
    if gate.kind == "share":
        return _share(gate, own, gate.bound.value)
    if gate.kind == "mean":
        return _mean(gate, own, gate.bound.value)
    return _plain(gate, own, gate.bound.value)


def _of_class(gate: Gate, run: RunMetrics) -> RunMetrics | None:
    if gate.traffic_class is None:
        return run
    if run.classes:
        return run.classes.get(gate.traffic_class)
    only = {request.record.traffic_class for request in run.requests}
    return run if only == {gate.traffic_class} else None


# ---- percentiles and shares: counts of violations ----


def _percentile(gate: Gate, run: RunMetrics, bound: float) -> GateResult:
    assert gate.q is not None
    values, _, undefined, _ = collect(gate.metric, run.judged)
    quantile = measured_quantile(gate, run)
    if not values:
        why = f"nothing to judge: {gate.metric} is undefined for all {len(run.judged)} requests"
        return GateResult(gate, Status.FAIL, why, quantile.value, bound, n=0)
    bad = _violations(gate, run, bound)
    result = _judge(gate, bad, 1.0 - gate.q / 100.0, bound, quantile.value)
    notes = [f"{undefined} undefined"] if undefined else []
    notes += [f"{sum(not r.ok for r in run.judged)} failed"] if not all(r.ok for r in run.judged) else []
    why = result.why + (f"; {' and '.join(notes)} count as violations" if notes else "")
    return GateResult(
        gate, result.status, why, result.value, bound, result.n, result.violations, quantile.low, quantile.high,
        result.too_few,
    )  # fmt: skip


def measured_quantile(gate: Gate, run: RunMetrics) -> stats.Quantile:
    """The gate's percentile with failed and undefined requests as +inf."""
    assert gate.q is not None
    values, giving, undefined, _ = collect(gate.metric, run.judged)
    missing = undefined + sum(not request.ok for request in run.judged)
    values.extend([math.inf] * (missing * infinities_per_failure(gate.metric, values, giving)))
    values.sort()
    if gate.metric in POOLED:
        return stats.pooled_quantile(values, gate.q, giving + missing)
    return stats.quantile(values, gate.q)


def _violations(gate: Gate, run: RunMetrics, bound: float) -> list[float]:
    """For each request to which the metric applies, in order of schedule: its share of violations, 0 or 1.

    For pooled gaps it is the share of the request's own gaps: requests, not gaps, are what may be independent.
    """
    bad: list[float] = []
    weights: list[int] = []
    for request in run.judged:
        if not applies(gate.metric, request):
            continue
        if gate.metric in POOLED:
            gaps = pooled_of(gate.metric, request) if request.ok else ()
            bad.append(sum(not gate.admits(gap, bound) for gap in gaps) / len(gaps) if gaps else 1.0)
            weights.append(len(gaps))
        else:
            value = value_of(gate.metric, request)
            bad.append(0.0 if value is not None and gate.admits(value, bound) else 1.0)
    if gate.metric not in POOLED:
        return bad
    given = [weight for weight in weights if weight]
    typical = sum(given) / len(given) if given else 1.0
    # Long answers weigh more, as they do in the pooled percentile; one that failed weighs as a typical one.
    total = sum(weight or typical for weight in weights)
    return [share * (weight or typical) * len(bad) / total for share, weight in zip(bad, weights, strict=True)]


def _share(gate: Gate, run: RunMetrics, bound: float) -> GateResult:
    if gate.metric == "goodput":
        slos = gate.slos or run.goodput.slos
        if not slos:
            raise ConfigError(f"{gate.text!r} needs objectives: --slo ttft<=500ms, or goodput(ttft<=500ms) >= 95%")
        answers = [[answer for slo in slos if (answer := slo.holds(r)) is not None] for r in run.requests]
        bad = [float(not (r.ok and all(a))) for r, a in zip(run.requests, answers, strict=True) if a]
        measured = goodput(run.requests, slos, None)
        value, low, high = measured.share, measured.low, measured.high
    else:
        bad = [float(not request.ok) for request in run.requests]
        value = run.success_share
        if gate.metric == "error_rate" and value is not None:
            value = 1.0 - value
        low = high = None
    if not bad:
        return GateResult(gate, Status.FAIL, "nothing to judge: no request was sent, or none applies", None, bound)
    allowed = bound if gate.upper else 1.0 - bound
    result = _judge(gate, bad, allowed, bound, value)
    return GateResult(gate, result.status, result.why, value, bound, result.n, result.violations, low, high,
                      result.too_few)  # fmt: skip


def _judge(gate: Gate, bad: Sequence[float], allowed: float, bound: float, value: float | None) -> GateResult:
    """The binomial test: is the share of violations shown to be at most `allowed`, or shown to be more?"""
    n, total = len(bad), math.fsum(bad)
    violations = math.ceil(total - 1e-9)
    seen = f"{violations} of {n} violate it, {math.floor(allowed * n + 1e-9)} may ({100.0 * allowed:.3g} %)"

    def answer(status: Status, why: str, too_few: bool = False) -> GateResult:
        return GateResult(gate, status, why, value, bound, n, violations, too_few=too_few)

    if allowed <= 0.0:  # "100 %": nothing is shown beyond this run, so the run itself is judged
        return answer(Status.FAIL if violations else Status.PASS, seen)
    if 1.0 - binomial_cdf(math.floor(total + 1e-9) - 1, n, allowed) <= ALPHA:
        return answer(Status.FAIL, seen)
    floor = stats.smallest_n(100.0 * (1.0 - allowed))
    if n < floor:
        return answer(Status.UNDECIDED, f"{seen}; with fewer than {floor} requests nothing can be shown", True)
    worth = min(stats.effective_n(bad), float(n))
    rounded = math.floor(worth + 1e-9)
    if binomial_cdf(math.ceil(total * worth / n - 1e-9), rounded, allowed) <= ALPHA:
        return answer(Status.PASS, seen)
    clustered = f" (clustered: worth {rounded} independent requests)" if worth < 0.9 * n else ""
    return answer(Status.UNDECIDED, f"{seen}{clustered}: too near the bound to say; measure longer")


# ---- means, maxima, counts, rates ----


def mean_with_interval(metric: str, requests: Sequence[RequestMetrics]) -> tuple[float | None, float, float] | None:
    """Mean of successes with its block-bootstrap interval; None where it has no bound or the run is too short."""
    pairs: list[tuple[float, float]] = []
    for request in requests:
        if not applies(metric, request):
            continue
        own = pooled_of(metric, request) if metric in POOLED else [value_of(metric, request)]
        value = stats.mean([entry for entry in own if entry is not None])
        if value is None:  # failed or undefined: +inf, as in every gate
            return math.inf, math.inf, math.inf
        pairs.append((request.record.scheduled_s, value))
    if not pairs:
        return None
    times, values = [when for when, _ in pairs], [value for _, value in pairs]
    # Short runs get shorter blocks, a dozen of them; below six there is no interval.
    block = min(stats.BLOCK_S, max((max(times) - min(times)) / 12.0, 1e-6))
    interval = stats.block_bootstrap(values, times, stats.mean, block_s=block)
    return (stats.mean(values), *interval) if interval else (stats.mean(values), -math.inf, math.inf)


def _mean(gate: Gate, run: RunMetrics, bound: float) -> GateResult:
    found = mean_with_interval(gate.metric, run.judged)
    if found is None:
        return GateResult(gate, Status.FAIL, f"nothing to judge: {gate.metric} is undefined", None, bound)
    value, low, high = found
    n = len(run.judged)
    if value == math.inf:
        why = "failed or undefined requests have no latency, so the mean has no bound; gate a percentile instead"
        return GateResult(gate, Status.FAIL, why, value, bound, n)
    if math.isinf(high):
        why = "too few requests, or too near in time, for an interval of the mean; measure longer"
        return GateResult(gate, Status.UNDECIDED, why, value, bound, n, too_few=True)
    why = f"95 % interval {format_value(low, 's')} to {format_value(high, 's')}"
    status = Status.PASS if gate.admits(high, bound) else Status.UNDECIDED if gate.admits(low, bound) else Status.FAIL
    return GateResult(gate, status, why, value, bound, n, low=low, high=high)


def _plain(gate: Gate, run: RunMetrics, bound: float) -> GateResult:
    """Maxima, counts and rates: statements about this run alone, without a test."""
    value = plain_value(gate, run)
    n = len(run.judged if gate.kind == "max" else run.requests)
    if value is None:
        return GateResult(gate, Status.FAIL, f"nothing to judge: {gate.metric} is undefined", None, bound, n)
    status = Status.PASS if gate.admits(value, bound) else Status.FAIL
    return GateResult(gate, status, "a statement about this run alone, without an interval", value, bound, n)


def plain_value(gate: Gate, run: RunMetrics) -> float | None:
    if not run.requests:
        return None
    if gate.kind == "max":
        values, _, undefined, _ = collect(gate.metric, run.judged)
        missing = undefined or not all(request.ok for request in run.judged)
        return math.inf if values and missing else max(values, default=None)
    if gate.kind == "rate":
        span = run.plateau if gate.plateau else run.whole
        rate: Rate | None = None
        if span is not None:
            name = gate.metric.removesuffix("_throughput")
            rate = getattr(span, "requests" if name == "request" else f"{name}_tokens")
        return None if rate is None else rate.per_s
    if gate.metric == "violations":
        answers = [slo.holds(request) for request in run.judged for slo in gate.slos]
        return float(sum(answer is False for answer in answers))
    wanted = {"timeouts": ErrorClass.TIMEOUT, "rejected": ErrorClass.REJECTED}.get(gate.metric)
    return float(run.failed if wanted is None else run.errors.get(wanted, 0))


# ---- relative to a baseline ----


def _against_baseline(gate: Gate, run: RunMetrics, baseline: RunMetrics | None) -> GateResult:
    """Both sides have sampling error: the difference's interval is recovered from the two (Zou and Donner's MOVER)."""
    ours = _estimate(gate, run)
    theirs = None if baseline is None else _estimate(gate, baseline)
    if ours is None or ours[0] is None:
        return GateResult(gate, Status.FAIL, f"nothing to judge: {gate.metric} is undefined", None, None)
    value, low, high = ours
    if theirs is None or theirs[0] is None or math.isinf(theirs[0]):
        return GateResult(gate, Status.UNDECIDED, "the baseline has no such value", value, None, len(run.requests))
    base, base_low, base_high = theirs
    assert value is not None
    assert base is not None
    bound, factor = gate.bound.against(base), gate.bound.factor
    n = len(run.judged)
    if math.isinf(value):
        return GateResult(gate, Status.FAIL, "failures reach this statistic", value, bound, n)
    if gate.kind in ("max", "count", "rate"):
        status = Status.PASS if gate.admits(value, bound) else Status.FAIL
        return GateResult(gate, status, "one run each, without an interval; `compare` gives one", value, bound, n)
    excess = value - bound
    up = math.hypot(high - value, factor * (base - base_low))
    down = math.hypot(value - low, factor * (base_high - base))
    best, worst = (excess - down, excess + up) if gate.upper else (excess + up, excess - down)
    status = Status.UNDECIDED
    if gate.admits(worst, 0.0):
        status = Status.PASS
    elif not gate.admits(best, 0.0):
        status = Status.FAIL
    margin = f"{format_value(abs(excess), gate.unit)} {'over' if excess > 0 else 'under'} the bound"
    why = f"{margin}; baseline {format_value(base, gate.unit)}" + (
        "" if status is not Status.UNDECIDED else "; within the noise of both runs"
    )
    return GateResult(gate, status, why, value, bound, n, low=low, high=high)


def _estimate(gate: Gate, run: RunMetrics) -> tuple[float | None, float, float] | None:
    """(value, low, high); infinite where there is no bound on that side."""
    if gate.kind == "percentile":
        found = measured_quantile(gate, run)
        low = -math.inf if found.low is None else found.low
        return found.value, low, math.inf if found.high is None else found.high
    if gate.kind == "mean":
        return mean_with_interval(gate.metric, run.judged)
    if gate.kind == "share":
        if gate.metric == "goodput":
            measured = goodput(run.requests, gate.slos or run.goodput.slos, None)
        else:
            measured = goodput(run.requests, (), None)  # without objectives: successes
        if measured.share is None or measured.low is None or measured.high is None:
            return None
        if gate.metric == "error_rate":
            return 1.0 - measured.share, 1.0 - measured.high, 1.0 - measured.low
        return measured.share, measured.low, measured.high
    return plain_value(gate, run), -math.inf, math.inf
