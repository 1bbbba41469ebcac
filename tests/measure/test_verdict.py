"""Verdicts: INVALID before DEGRADED before gates, each finding from a run that shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from paceline.measure.gates import evaluate, parse_gate
from paceline.measure.plan import Arrivals, BenchPlan, Load, Prompts, Target
from paceline.measure.records import (
    ErrorClass,
    Manifest,
    RequestRecord,
    Segment,
    SelfCheck,
    TokenFit,
    Usage,
    WorkerSample,
)
from paceline.measure.slo import parse_slos
from paceline.measure.summary import measure_run
from paceline.measure.verdict import Level, Outcome, Reason, Verdict, findings, judge
from tests.measure.making import failed, records_of, streamed

OPEN = BenchPlan(target=Target(url="http://x"), load=Load(arrivals=Arrivals.POISSON, rate=10, requests=100))
CLOSED = msgspec.structs.replace(OPEN, load=Load(arrivals=Arrivals.CLOSED, concurrency=4, requests=100))


def manifest(**fields: Any) -> Manifest:
    fields.setdefault("segments", [Segment(index=0, t0_ns=0, t0_wall="", ended="complete")])
    return Manifest(run_id="r", created="", plan={}, seed=0, **fields)


def verdict(
    records: Sequence[RequestRecord],
    *,
    plan: BenchPlan = OPEN,
    gates: Sequence[str] = (),
    samples: Sequence[WorkerSample] = (),
    slos: str = "",
    **fields: Any,
) -> Verdict:
    run = measure_run(
        records, slos=parse_slos(slos), concurrency=plan.load.concurrency, open_loop=plan.load.concurrency is None
    )
    results = [evaluate(parse_gate(text), run) for text in gates]
    return judge(findings(manifest(**fields), plan, records, run, samples), results)


def codes(found: Verdict) -> set[str]:
    return {reason.code for reason in found.reasons}


def test_where_nothing_succeeds_the_first_reason_is_told() -> None:
    lost = failed(ErrorClass.HTTP_4XX, error_message="a prompt of 900 tokens\nis too long")
    found = verdict([lost, failed(ErrorClass.HTTP_4XX, at_s=1.0, error_message="another")])
    said = next(reason.text for reason in found.reasons if reason.code == "no_success")
    assert said == "none of 2 requests succeeded (http_4xx 2); the first: a prompt of 900 tokens is too long"


def noisy(n: int = 400, seed: int = 0) -> list[RequestRecord]:
    rng = random.Random(seed)
    return records_of([100 + 30 * rng.random() for _ in range(n)])


def test_a_clean_run_passes_and_its_gates_decide() -> None:
    records = noisy()
    clean = verdict(records)
    assert (clean.outcome, clean.exit_code, codes(clean)) == (Outcome.PASS, 0, set())
    assert verdict(records, gates=["p95 ttft <= 500ms"]).outcome is Outcome.PASS
    missed = verdict(records, gates=["p95 ttft <= 500ms", "p95 ttft <= 50ms"])
    assert (missed.outcome, missed.exit_code) == (Outcome.FAIL, 1)
    assert "p95 ttft <= 50ms" in missed.headline


def late(record: RequestRecord, by_s: float) -> RequestRecord:
    assert record.dispatched_s is not None
    return msgspec.structs.replace(record, dispatched_s=record.dispatched_s + by_s)


def test_late_client_is_invalid_even_if_every_gate_fails() -> None:
    records = [late(r, 0.006) if i % 50 == 0 else r for i, r in enumerate(noisy())]
    found = verdict(records, gates=["p95 ttft <= 1ms"])
    assert (found.outcome, found.exit_code) == (Outcome.INVALID, 3)
    assert "late" in codes(found)
    assert verdict([late(r, 0.006) if i % 200 == 0 else r for i, r in enumerate(noisy())]).outcome is Outcome.PASS
    # With a strict objective 5 ms is no longer nothing.
    strict = [late(r, 0.003) for r in noisy()]
    assert verdict(strict, slos="ttft<=200ms").outcome is Outcome.PASS
    assert "late" in codes(verdict(strict, slos="ttft<=50ms"))


def test_one_late_request_does_not_spoil_a_short_run() -> None:
    one, two = ([late(r, 0.05) if i < k else r for i, r in enumerate(noisy(10))] for k in (1, 2))
    assert verdict(one).outcome is not Outcome.INVALID
    assert "late" in codes(verdict(one))  # said all the same
    assert verdict(two).outcome is Outcome.INVALID


def test_the_caps_wait_is_not_the_clients_fault() -> None:
    records = [msgspec.structs.replace(late(r, 0.5), cap_wait_s=0.5) for r in noisy()]
    assert verdict(records).outcome is Outcome.PASS
    assert (
        verdict([late(r, 0.5) for r in noisy()], plan=CLOSED).outcome is Outcome.PASS
    )  # a closed loop has no due time


def test_rate_off_is_invalid() -> None:
    records = [late(r, 0.002 * i) for i, r in enumerate(noisy(100))]
    assert "rate" in codes(verdict(records))
    short = noisy(50)
    assert "unsent" in codes(verdict(short, requests_planned=100))


@pytest.mark.parametrize("error", [ErrorClass.CLIENT_FD, ErrorClass.CLIENT_PORT])
def test_a_single_client_limit_error_is_invalid(error: ErrorClass) -> None:
    found = verdict([*noisy(), failed(error, at_s=100.0, status=None)])
    assert found.outcome is Outcome.INVALID
    assert str(error) in codes(found)


def test_loop_lag_and_self_check() -> None:
    samples = [WorkerSample(segment=0, worker=0, t_s=i * 0.25, in_flight=1, lags_s=(0.0, 0.02)) for i in range(8)]
    assert "lag" in codes(verdict(noisy(), samples=samples))
    once = [WorkerSample(segment=0, worker=0, t_s=0.25, in_flight=1, lags_s=(0.0,) * 25 + (0.2,))]
    assert "lag" not in codes(verdict(noisy(), samples=once))
    check = SelfCheck(streams=200, tokens_per_s=50, workers=1, requests=10, ok=False, why="p99 ITL error 20 ms")
    found = verdict(noisy(), self_check=check)
    assert found.outcome is Outcome.INVALID
    assert "20 ms" in found.headline


def test_endings() -> None:
    cut = [Segment(index=0, t0_ns=0, t0_wall="", ended="interrupted")]
    assert verdict(noisy(), segments=cut).outcome is Outcome.DEGRADED
    crashed = [Segment(index=0, t0_ns=0, t0_wall="")]
    assert verdict(noisy(), segments=crashed).outcome is Outcome.DEGRADED
    broken = [Segment(index=0, t0_ns=0, t0_wall="", ended="failed: a worker died")]
    assert verdict(noisy(), segments=broken).outcome is Outcome.INVALID


def test_nothing_succeeded() -> None:
    rejected = [failed(at_s=0.1 * i, id=str(i)) for i in range(30)]
    assert (verdict(rejected).outcome, verdict(rejected).exit_code) == (Outcome.FAIL, 1)
    unauthorised = [failed(ErrorClass.AUTH, at_s=0.1 * i, id=str(i), status=401) for i in range(30)]
    assert verdict(unauthorised).outcome is Outcome.INVALID
    assert verdict([]).outcome is Outcome.INVALID


def test_drift_degrades_a_steady_load_only() -> None:
    rising = records_of([100 + i + 5 * (i % 7) for i in range(400)])
    found = verdict(rising, gates=["p50 ttft <= 10s"])
    assert (found.outcome, found.exit_code) == (Outcome.DEGRADED, 2)
    assert codes(found) & {"drift", "overload"}
    ramp = msgspec.structs.replace(OPEN, load=Load(rate=1, ramp_to=20, duration_s=40))
    assert verdict(rising, plan=ramp).outcome is Outcome.PASS


def test_overload_is_named() -> None:
    growing = records_of([100 + 100.0 * i for i in range(300)])
    found = verdict(growing)
    assert "overload" in codes(found)
    assert "cannot keep up" in found.headline


def test_too_few_for_a_gate() -> None:
    found = verdict(noisy(100), gates=["p99 ttft <= 10s"])
    assert (found.outcome, found.exit_code) == (Outcome.DEGRADED, 2)
    assert "thin" in codes(found)
    near = verdict(records_of([600.0 if i % 10 == 0 else 100.0 for i in range(400)]), gates=["p90 ttft <= 500ms"])
    assert (near.outcome, near.exit_code) == (Outcome.UNDECIDED, 2)


def test_warm_cache() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=5, cached_tokens=60)
    warm = [msgspec.structs.replace(r, usage=usage) for r in noisy()]
    assert "warm" in codes(verdict(warm))
    assert verdict(warm, labels={"cache": "primed"}).outcome is Outcome.PASS
    template = TokenFit(method="usage", overhead_tokens=60)  # the same in every prompt
    assert verdict(warm, token_fit=template).outcome is Outcome.PASS
    shared = msgspec.structs.replace(OPEN, prompts=Prompts(prefix_tokens=64))
    assert verdict(warm, plan=shared).outcome is Outcome.PASS


def test_prompt_lengths_off() -> None:
    off = [msgspec.structs.replace(r, prompt_tokens_wanted=110) for r in noisy()]
    found = verdict(off)
    assert found.outcome is Outcome.DEGRADED
    assert "400 of 400" in found.headline
    near = [msgspec.structs.replace(r, prompt_tokens_wanted=101) for r in noisy()]
    assert verdict(near).outcome is Outcome.PASS


def test_without_gates_a_run_whose_requests_fail_does_not_pass() -> None:
    few = [*noisy(300), *(failed(at_s=5.0 * i) for i in range(3))]
    many = [*noisy(300), *(failed(at_s=5.0 * i) for i in range(4))]
    assert verdict(few).outcome is Outcome.PASS
    found = verdict(many)
    assert found.outcome is Outcome.FAIL
    assert "4 of 304 requests failed" in found.headline
    assert verdict(many, gates=["success >= 50%"]).outcome is Outcome.PASS  # who says how many, decides


def test_littles_law() -> None:
    records = records_of([900.0] * 300, tokens=6)  # every 100 ms, one second each: ten in flight
    right = [WorkerSample(segment=0, worker=0, t_s=i * 0.25, in_flight=10) for i in range(4, 110)]
    wrong = [msgspec.structs.replace(s, in_flight=14) for s in right]
    assert "little" not in codes(verdict(records, samples=right))
    assert "little" in codes(verdict(records, samples=wrong))


def test_notes_change_nothing() -> None:
    records = [streamed([100, 110, 200], n=9, at_s=0.1 * i, id=str(i)) for i in range(200)]
    found = verdict(records)
    assert found.outcome is Outcome.PASS
    assert "estimated" in codes(found)


def test_order_of_precedence() -> None:
    reasons = [Reason(Level.DEGRADED, "d", "d"), Reason(Level.INVALID, "i", "i")]
    assert judge(reasons, []).outcome is Outcome.INVALID
    assert judge(reasons[:1], []).outcome is Outcome.DEGRADED
    assert [
        o.exit_code for o in (Outcome.PASS, Outcome.FAIL, Outcome.UNDECIDED, Outcome.DEGRADED, Outcome.INVALID)
    ] == [
        0,
        1,
        2,
        2,
        3,
    ]
