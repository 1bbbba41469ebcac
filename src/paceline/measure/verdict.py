"""May anybody rely on this run, and did it keep its promises?

    INVALID     the client, not the server, was measured: late, short of descriptors or ports, off its rate, too slow
    DEGRADED    the server was measured, but not what was meant: drifting, too few, cache warm, lengths off, cut short
    FAIL        a gate failed, or nothing succeeded, or without any gate over 1 % failed
    UNDECIDED   a gate could not be decided
    PASS        every gate passed; without gates: nothing stands against the numbers

The first that applies, in this order, is the verdict; every reason is kept, whatever its level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.measure.gates import GateResult, Status
from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.records import ErrorClass, Manifest, RequestRecord, WorkerSample
from paceline.measure.slo import format_seconds
from paceline.measure.stats import percentile
from paceline.measure.summary import RunMetrics

LATE_S = 0.005  # a dispatch later than this, or than 5 % of the TTFT objective, is late
LATE_SHARE = 0.01  # of arrivals, and more than one: a single hiccup among ten is inside the latency, and is noted
RATE_TOLERANCE = 0.01
LAG_P99_S = 0.010  # of the event loop
MISMATCH_SHARE = 0.01  # of requests whose prompt was not as long as wanted
WARM_SHARE = 0.05  # of prompt tokens from a cache that nothing in the load explains
LITTLE_TOLERANCE = 0.05
FAILED_SHARE = 0.01  # of requests: where no gate says how many may fail, no more than these
MANY_FAILURES = "many_failures"
_CANNOT_RUN = frozenset(
    {
        ErrorClass.CONNECT,
        ErrorClass.TLS,
        ErrorClass.AUTH,
        ErrorClass.NOT_FOUND,
        ErrorClass.MALFORMED,
        ErrorClass.HTTP_4XX,
        ErrorClass.CLIENT_FD,
        ErrorClass.CLIENT_PORT,
    }
)


class Outcome(StrEnum):
    """In order of precedence."""

    INVALID = "INVALID"
    DEGRADED = "DEGRADED"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"
    PASS = "PASS"  # noqa: S105 - a verdict

    @property
    def exit_code(self) -> int:
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INVALID: 3}.get(self, 2)


class Level(StrEnum):
    INVALID = "invalid"
    DEGRADED = "degraded"
    FAIL = "fail"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding: its level, a stable code for machines, one sentence for people."""

    level: Level
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reasons: tuple[Reason, ...]
    gates: tuple[GateResult, ...]

    @property
    def exit_code(self) -> int:
        return self.outcome.exit_code

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        of_level = {Outcome.INVALID: Level.INVALID, Outcome.DEGRADED: Level.DEGRADED}.get(self.outcome)
        if of_level is not None:
            return "; ".join(reason.text for reason in self.reasons if reason.level is of_level)
        if self.outcome is Outcome.FAIL and (failed := [r.text for r in self.reasons if r.level is Level.FAIL]):
            return "; ".join(failed)
        if not self.gates:
            return "no gates were set; nothing stands against the numbers"
        wanted = {Outcome.FAIL: Status.FAIL, Outcome.UNDECIDED: Status.UNDECIDED}.get(self.outcome)
        if wanted is None:
            return f"all {len(self.gates)} gates hold" if len(self.gates) > 1 else "the gate holds"
        verb = "fails" if wanted is Status.FAIL else "is open"
        return "; ".join(f"{g.gate.text} {verb} at {g.value_text}: {g.why}" for g in self.gates if g.status is wanted)


def judge(reasons: Iterable[Reason], gates: Sequence[GateResult]) -> Verdict:
    """The verdict from all findings and all gate results."""
    reasons = list(reasons)
    if not gates:  # nothing was asked for, but nobody asks for this
        reasons = [replace(r, level=Level.FAIL) if r.code == MANY_FAILURES else r for r in reasons]
    short = [result.gate.text for result in gates if result.too_few]
    if short:
        text = f"too few requests to judge {', '.join(short)}"
        reasons.append(Reason(Level.DEGRADED, "thin", text))
    levels = {reason.level for reason in reasons}
    statuses = {result.status for result in gates}
    if Level.INVALID in levels:
        outcome = Outcome.INVALID
    elif Level.DEGRADED in levels:
        outcome = Outcome.DEGRADED
    elif Level.FAIL in levels or Status.FAIL in statuses:
        outcome = Outcome.FAIL
    elif Status.UNDECIDED in statuses:
        outcome = Outcome.UNDECIDED
    else:
        outcome = Outcome.PASS
    return Verdict(outcome, tuple(reasons), tuple(gates))


def findings(
    manifest: Manifest,
    plan: BenchPlan,
    records: Sequence[RequestRecord],
    run: RunMetrics,
    samples: Sequence[WorkerSample] = (),
    server_cache_share: float | None = None,
) -> list[Reason]:
    """Everything that speaks against a run, gravest first.

    `records` are all of the measured phase; `server_cache_share` is what the server's own counters say of its cache.
    """
    found = [
        *_client_errors(run),
        *_lateness(plan, records, run),
        *_achieved_rate(manifest, plan, records),
        *_loop_lag(samples),
        *_self_check(manifest),
        *_ending(manifest, run),
        *_successes(run),
        *_stationarity(plan, run),
        *_cache(manifest, plan, run, server_cache_share),
        *_lengths(records),
        *_little(run, records, samples),
        *_notes(run),
    ]
    order = list(Level)
    return sorted(found, key=lambda reason: order.index(reason.level))


def _client_errors(run: RunMetrics) -> Iterable[Reason]:
    for error, what in (
        (ErrorClass.CLIENT_FD, "file descriptors (ulimit -n)"),
        (ErrorClass.CLIENT_PORT, "ephemeral ports"),
    ):
        if count := run.errors.get(error, 0):
            yield Reason(Level.INVALID, str(error), f"the client ran out of {what} for {count} requests")


def late_bound_s(run: RunMetrics) -> float:
    """How late a dispatch may be: 5 ms, or 5 % of the TTFT objective where that is less."""
    objectives = [slo.bound_s for slo in run.goodput.slos if slo.metric.startswith("ttft")]
    return min([LATE_S, *(0.05 * bound for bound in objectives)])


def client_lateness(records: Iterable[RequestRecord]) -> list[float]:
    """Seconds from due to dispatch that the client itself is to blame for: without the cap's wait.

    Later turns of a conversation are left out: their due time may pass while the server still answers the turn before.
    """
    return [r.dispatched_s - r.scheduled_s - r.cap_wait_s for r in records if r.dispatched_s is not None and not r.turn]


def _lateness(plan: BenchPlan, records: Sequence[RequestRecord], run: RunMetrics) -> Iterable[Reason]:
    if plan.load.arrivals is Arrivals.CLOSED:
        return
    lateness, bound = client_lateness(records), late_bound_s(run)
    late = sum(value > bound for value in lateness)
    if late:
        worst = format_seconds(max(lateness))
        text = f"the client sent {late} of {len(lateness)} requests over {format_seconds(bound)} late (worst {worst})"
        yield Reason(Level.INVALID if late > max(1.0, LATE_SHARE * len(lateness)) else Level.NOTE, "late", text)


def _achieved_rate(manifest: Manifest, plan: BenchPlan, records: Sequence[RequestRecord]) -> Iterable[Reason]:
    if plan.load.arrivals is Arrivals.CLOSED:
        return
    arrivals = [r for r in records if r.turn == 0]
    sent = [(r.scheduled_s, r.dispatched_s - r.cap_wait_s) for r in arrivals if r.dispatched_s is not None]
    if len(sent) >= 20:
        planned = max(due for due, _ in sent) - min(due for due, _ in sent)
        achieved = max(when for _, when in sent) - min(when for _, when in sent)
        if planned > 0.0 and abs(planned / max(achieved, 1e-9) - 1.0) > RATE_TOLERANCE:
            off, rate = planned / max(achieved, 1e-9) - 1.0, (len(sent) - 1) / planned
            text = f"the client reached {rate * (1 + off):.4g} of {rate:.4g} requests per second ({100 * off:+.1f} %)"
            yield Reason(Level.INVALID, "rate", text)
    missing = max(manifest.requests_planned, len(records)) - sum(r.sent for r in records)
    complete = manifest.complete and not manifest.conversations_planned
    if complete and missing > RATE_TOLERANCE * max(manifest.requests_planned, len(records)):
        text = f"{missing} of {manifest.requests_planned} planned requests were never sent"
        yield Reason(Level.INVALID, "unsent", text)


def _loop_lag(samples: Sequence[WorkerSample]) -> Iterable[Reason]:
    lags = [lag for sample in samples for lag in sample.lags_s]
    lag = percentile(lags, 99.0)
    if lag is not None and lag > LAG_P99_S and sum(value > LAG_P99_S for value in lags) > 1:
        yield Reason(Level.INVALID, "lag", f"the client's event loop woke late: p99 {format_seconds(lag)}, 10ms may be")


def _self_check(manifest: Manifest) -> Iterable[Reason]:
    check = manifest.self_check
    if check is not None and not check.ok:
        text = f"the client cannot measure the planned load on this machine: {check.why or 'its self-check failed'}"
        yield Reason(Level.INVALID, "self_check", text)


def _ending(manifest: Manifest, run: RunMetrics) -> Iterable[Reason]:
    ended = manifest.segments[-1].ended if manifest.segments else ""
    if ended.startswith("failed"):
        yield Reason(Level.INVALID, "failed", f"the run {ended}")
    elif ended == "overloaded":
        text = f"the engine cannot take this load: the simulation stopped at {format_seconds(run_end_s(manifest))}"
        yield Reason(Level.DEGRADED, "overload", text)
    elif ended != "complete" and manifest.kind == "real":
        state = "was interrupted" if ended == "interrupted" else "has no end (it runs, or it crashed)"
        yield Reason(Level.DEGRADED, "incomplete", f"the run {state} after {len(run.requests)} requests; resume it")
    elif ended == "interrupted":
        yield Reason(Level.DEGRADED, "incomplete", f"the simulation was interrupted after {len(run.requests)} requests")


def run_end_s(manifest: Manifest) -> float:
    """When the last stretch of load ended, on the schedule's axis."""
    return (manifest.segments[-1].ended_s or 0.0) if manifest.segments else 0.0


def _successes(run: RunMetrics) -> Iterable[Reason]:
    if not run.requests:
        yield Reason(Level.INVALID, "empty", "no request was sent")
    elif not run.succeeded:
        counts = ", ".join(f"{error} {count}" for error, count in run.errors.items())
        level = Level.INVALID if set(run.errors) <= _CANNOT_RUN else Level.FAIL
        text = f"none of {len(run.requests)} requests succeeded ({counts})"
        said = " ".join(next((r.record.error_message for r in run.requests if r.record.error_message), "").split())
        yield Reason(level, "no_success", f"{text}; the first: {said}" if said else text)


def steady_load(plan: BenchPlan) -> bool:
    """Whether the load is meant to stay the same all along."""
    load = plan.load
    return load.ramp_to is None and load.burst_rate is None and load.arrivals is not Arrivals.TRACE


def _stationarity(plan: BenchPlan, run: RunMetrics) -> Iterable[Reason]:
    ttft, level = run.ttft_trend, run.in_flight_trend
    if not steady_load(plan) or ttft is None or not ttft.drifting:
        return
    figures = (
        f"TTFT changed by {100 * ttft.change:+.0f} % over the run (Spearman {ttft.rho:+.2f}, p {ttft.p_value:.3f})"
    )
    if level is not None and level.drifting and level.rho > 0 and ttft.rho > 0:
        yield Reason(
            Level.DEGRADED, "overload", f"the server cannot keep up: {figures}, requests in flight grew with it"
        )
    else:
        yield Reason(Level.DEGRADED, "drift", f"not stationary: {figures}")


def cache_explained(plan: BenchPlan) -> bool:
    """Whether the load itself shares text between requests, so that hits are meant."""
    prompts = plan.prompts
    turns = prompts.turns.high if prompts.turns.kind != "fixed" else prompts.turns.value
    return prompts.prefix_tokens > 0 or turns > 1 or plan.trace is not None or prompts.file is not None


def cached_share(run: RunMetrics) -> float | None:
    """Cached tokens over prompt tokens, of the requests whose usage tells both."""
    told = [
        (request.cached_tokens, request.input_tokens)
        for request in run.requests
        if request.cached_tokens is not None and request.input_tokens
    ]
    total = sum(prompt for _, prompt in told if prompt)
    return sum(cached for cached, _ in told if cached) / total if total else None


def _cache(manifest: Manifest, plan: BenchPlan, run: RunMetrics, server_share: float | None) -> Iterable[Reason]:
    share = cached_share(run)
    share = server_share if share is None else share
    if share is None or manifest.labels.get("cache") == "primed" or cache_explained(plan):
        return
    if share > WARM_SHARE + _template_share(manifest, run):
        text = f"the cache was warm: {100 * share:.0f} % of prompt tokens came from it, and the load shares no text"
        yield Reason(Level.DEGRADED, "warm", text)


def _template_share(manifest: Manifest, run: RunMetrics) -> float:
    """What the chat template, alike in all prompts, may add to the cached share."""
    overhead = manifest.token_fit.overhead_tokens if manifest.token_fit else 0
    lengths = [request.input_tokens for request in run.requests if request.input_tokens]
    return min(1.0, overhead * len(lengths) / sum(lengths)) if lengths else 0.0


def length_mismatches(records: Iterable[RequestRecord]) -> tuple[int, int, float]:
    """(checked, off by more than 1 % and more than a token, worst relative difference) of prompt lengths."""
    checked = off = 0
    worst = 0.0
    for record in records:
        told = record.usage.prompt_tokens if record.usage else None
        if record.prompt_tokens_wanted and told is not None:
            difference = abs(told - record.prompt_tokens_wanted)
            checked += 1
            off += difference > 1 and difference > 0.01 * record.prompt_tokens_wanted
            worst = max(worst, difference / record.prompt_tokens_wanted)
    return checked, off, worst


def _lengths(records: Sequence[RequestRecord]) -> Iterable[Reason]:
    checked, off, worst = length_mismatches(records)
    if off > MISMATCH_SHARE * checked:
        text = (
            f"{off} of {checked} prompts were not as long as wanted, in the server's tokens (worst {100 * worst:.0f} %)"
        )
        yield Reason(Level.DEGRADED, "lengths", text)


def _little(run: RunMetrics, records: Sequence[RequestRecord], samples: Sequence[WorkerSample]) -> Iterable[Reason]:
    """Little's law: requests in flight, counted by the workers' clocks, are arrival rate times time in the system."""
    if run.whole is None:
        return
    sampled = sampled_in_flight(samples, run.whole.span.start_s, run.whole.span.end_s)
    expected = run.whole.mean_in_flight
    if sampled is None or expected is None or expected < 1.0:
        return
    level, error = sampled
    if abs(level - expected) > LITTLE_TOLERANCE * expected + 3.0 * error:
        text = f"Little's law is broken: {level:.3g} in flight were counted, rate times latency gives {expected:.3g}"
        yield Reason(Level.DEGRADED, "little", text)


def sampled_in_flight(samples: Sequence[WorkerSample], start_s: float, end_s: float) -> tuple[float, float] | None:
    """(mean, standard error) of in-flight counts summed over workers; None below 50 samples of each worker."""
    workers: dict[int, list[float]] = {}
    for sample in samples:
        if start_s <= sample.t_s <= end_s:
            workers.setdefault(sample.worker, []).append(float(sample.in_flight))
    if not workers or min(map(len, workers.values())) < 50:
        return None
    total, variance = 0.0, 0.0
    for levels in workers.values():
        centre = math.fsum(levels) / len(levels)
        total += centre
        # Neighbouring samples see the same requests: a tenth of them is taken as independent.
        variance += math.fsum((x - centre) ** 2 for x in levels) / len(levels) / (len(levels) / 10.0)
    return total, math.sqrt(variance)


def _notes(run: RunMetrics) -> Iterable[Reason]:
    if run.first_wave:
        text = f"the first wave of {run.first_wave} requests, which all start together, is left out of the latencies"
        yield Reason(Level.NOTE, "first_wave", text)
    elif run.requests and all(request.record.first_wave for request in run.requests):
        yield Reason(Level.NOTE, "first_wave", "every request belongs to the first wave, which all start together")
    if run.tokens_estimated:
        text = (
            f"for {run.tokens_estimated} requests the server did not tell how many tokens each event held; "
            "they were shared out by characters"
        )
        yield Reason(Level.NOTE, "estimated", text)
    if run.failed and run.succeeded:
        counts = ", ".join(f"{error} {count}" for error, count in run.errors.items())
        code = MANY_FAILURES if run.failed > FAILED_SHARE * len(run.requests) else "failures"
        yield Reason(Level.NOTE, code, f"{run.failed} of {len(run.requests)} requests failed ({counts})")
