"""What benchmarks/interference.py makes of records: its judgements, on records whose answer is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec
import pytest
from _interference import judge
from _interference.quick import _Asked
from _interference.scenario import Scenario, trace_lengths
from _interference.tenants import write_keys
from _interference.variants import LEAN, SLO, SMOKE, VARIANTS, Variant
from _state import State
from hypothesis import given
from hypothesis import strategies as st

from paceline.app.config import resolve
from paceline.core.pace import Pace, Pacer
from paceline.core.policies.registry import make_policy
from paceline.measure.metrics import measure
from paceline.measure.records import ErrorClass
from paceline.measure.slo import parse_slos
from paceline.serve.keys import hash_key, read_key_file
from tests.measure.making import failed, streamed

PERIOD_S = 2.0


def test_gaps_count_while_newcomers_disturb() -> None:
    # Tokens at 0, 100, ... 900 ms, with one stall of 500 ms that ends at 1.4 s.
    stream = streamed([100.0 * k for k in range(10)] + [1400.0, 1500.0], n=12)
    assert judge.steady_gaps([stream], 1.0, 1.45) == [pytest.approx(0.5)]
    whole = judge.steady_gaps([stream], 0.0, 9.0)
    assert len(whole) == 11
    assert sum(gap > 0.2 for gap in whole) == 1
    cut_off = msgspec.structs.replace(stream, error=ErrorClass.CANCELLED)
    assert judge.steady_gaps([cut_off], 0.0, 9.0) == whole, "the end of the run cut it off; its gaps were real"


def test_a_stream_that_failed_is_infinitely_slow_and_a_newcomer_that_failed_infinitely_late() -> None:
    assert judge.steady_gaps([failed()], 0.0, 9.0) == [math.inf]
    assert judge.first_tokens([failed(at_s=2.0), streamed([70.0], at_s=1.0, n=1)]) == [pytest.approx(0.07), math.inf]
    row = judge.streams_row([failed()], [failed(at_s=2.0), streamed([70.0], at_s=1.0, n=1)], PERIOD_S)
    assert row["itl_p99_s"] == math.inf
    assert row["ttft_p95_s"] == math.inf
    assert row["failed"] == 1


def test_newcomers_of_another_run_are_found_on_the_axis_of_the_streams() -> None:
    stream = streamed([100.0 * k for k in range(20)] + [2900.0, 3000.0], n=22)  # a stall that ends at 2.9 s
    newcomer = streamed([200.0], at_s=0.0, n=1)
    assert judge.streams_row([stream], [newcomer], PERIOD_S, apart_s=2.8)["itl_p99_s"] == pytest.approx(1.0, abs=0.02)
    assert judge.streams_row([stream], [newcomer], PERIOD_S, apart_s=0.5)["itl_p99_s"] == pytest.approx(0.1)


@given(
    first_s=st.floats(0.1, 20.0),
    longer=st.floats(1.25, 5.0),
    count=st.integers(4, 30),
    seed=st.integers(0, 10**6),
)
def test_a_queue_that_takes_in_more_than_it_serves_is_found_and_one_that_does_not_is_none(
    first_s: float, longer: float, count: int, seed: int
) -> None:
    """A queue served one by one: each newcomer takes `longer` periods, or just under one."""
    rng = random.Random(seed)

    def waits(service_s: float) -> list[float]:
        free_s, found = 0.0, []
        for number in range(count):
            at_s = number * PERIOD_S
            free_s = max(free_s, at_s) + service_s
            found.append(first_s + free_s - at_s + rng.uniform(0.0, 0.05) * PERIOD_S)
        return found

    assert judge.grows(waits(longer * PERIOD_S), PERIOD_S)
    assert not judge.grows(waits(0.95 * PERIOD_S), PERIOD_S)


def test_jitter_one_late_newcomer_or_too_few_are_no_growth_and_one_that_never_came_is() -> None:
    assert not judge.grows([1.0, 9.0, 1.2, 0.9, 1.1, 8.0], PERIOD_S)
    assert not judge.grows([1.0, 2.0, 9.0], PERIOD_S)
    assert judge.grows([1.0, 1.0, 1.0, math.inf], PERIOD_S)


def test_the_best_preset_is_inside_the_target_and_is_never_ours() -> None:
    results = {
        "slo": {"itl_p99_s": 0.01, "ttft_p95_s": 0.1},
        "fast but rude": {"itl_p99_s": 0.2, "ttft_p95_s": 0.2},
        "slow": {"itl_p99_s": 0.08, "ttft_p95_s": 9.0},
        "best": {"itl_p99_s": 0.1, "ttft_p95_s": 3.0},
    }
    assert judge.best_inside(results, 0.1) == "best"
    assert judge.best_inside(results, 0.05) is None
    assert judge.nearest(results) == "slow"
    assert judge.nearest({"slo": results["slo"]}) is None


def test_the_best_setting_of_a_preset_is_good_for_most_and_of_equals_the_smoothest() -> None:
    found = {
        "a": {"goodput": 0.5, "itl_p99_s": 0.1},
        "a, chunked": {"goodput": 0.9, "itl_p99_s": 0.3},
        "b": {"goodput": 0.9, "itl_p99_s": 0.3},
        "b, chunked": {"goodput": 0.9, "itl_p99_s": 0.2},
    }
    presets = {"a": "a", "a, chunked": "a", "b": "b", "b, chunked": "b"}
    assert judge.best_of_each(found, presets) == {"a": "a, chunked", "b": "b, chunked"}


def test_outcomes_are_by_scheduled_time_and_count_failures_as_bad() -> None:
    slos = parse_slos("ttft <= 100ms, itl_p95 <= 50ms")
    good, late, rough = [50.0, 90.0], [150.0, 190.0], [50.0, 190.0]
    records = [
        streamed(late, at_s=2.0, n=2),
        streamed(good, at_s=1.0, n=2),
        failed(at_s=3.0),
        streamed(rough, at_s=4.0, n=2),
        streamed([50.0], at_s=5.0, n=1),  # a gap has no meaning for one token
    ]
    assert judge.outcomes(records, slos) == [(1.0, True), (2.0, False), (3.0, False), (4.0, False), (5.0, True)]
    assert judge.share(judge.outcomes(records, slos)) == 0.4
    assert judge.share([]) == 0.0


def test_attainment_is_back_with_the_first_window_that_holds() -> None:
    # Burst until 10 s; requests every second; good again from 15 s on, with one bad one at 30 s.
    found = [(float(t), t < 5 or (t >= 15 and t != 30)) for t in range(60)]
    assert judge.recovery_s(found, 10.0, width=10) == 5.0
    assert judge.recovery_s(found, 10.0, width=20) == 5.0  # 19 of the 20 from 15 s on are good: 95 %
    assert judge.recovery_s(found, 10.0, width=19) == 21.0  # 18 of 19 are not enough
    assert judge.recovery_s([(t, False) for t, _ in found], 10.0) is None
    assert judge.recovery_s(found[:25], 10.0, width=20) is None, "too few after the burst to tell"
    assert judge.recovery_s([(float(t), True) for t in range(60)], 10.0) == 0.0


def test_attainment_over_time_has_a_point_for_each_window() -> None:
    found = [(0.0, True), (1.0, False), (2.0, True), (3.0, True)]
    assert judge.attainment(found, 2) == [(1.0, 0.5), (2.0, 0.5), (3.0, 1.0)]
    assert judge.attainment(found, 9) == []


def test_refused_is_not_lost_and_everything_else_that_failed_is() -> None:
    refused = failed(ErrorClass.REJECTED, status=429)
    unavailable = failed(ErrorClass.REJECTED, status=503)
    cut = failed(ErrorClass.TRUNCATED, status=200)
    assert judge.lost([streamed([1.0], n=1), refused]) == 0
    assert judge.lost([refused, unavailable, cut]) == 2


@given(truth=st.floats(0.3, 80.0), start=st.floats(0.5, 3.0))
def test_the_search_finds_a_capacity_to_a_tenth_or_says_none(truth: float, start: float) -> None:
    floor = start / 4
    asked: list[tuple[float, int]] = []

    def holds(rate: float, attempt: int) -> bool:
        assert rate >= floor
        asked.append((rate, attempt))
        return rate <= truth

    found = judge.highest(holds, start, floor=floor)
    if truth < floor:
        assert found is None
    else:
        assert found is not None
        assert found <= truth <= 1.1001 * found or (found == 100 * start and truth >= found)
        assert found == 100 * start or (found, 1) in asked, "it was confirmed"
    assert len(asked) < 30


def test_a_lucky_run_is_not_believed() -> None:
    def holds(rate: float, attempt: int) -> bool:
        return rate <= (2.0 if attempt in (0, judge.AGAIN) else 1.0)

    found = judge.highest(holds, 1.0, floor=0.1)
    assert found is not None
    assert 0.9 <= found <= 1.0


def test_an_unlucky_run_is_not_believed_either() -> None:
    """A policy held 2.5 requests a second, lost 6 of 90 to a slow moment at 3.0, and held 4.5 twice."""

    def holds(rate: float, attempt: int) -> bool:
        return rate <= (1.0 if attempt == 0 else 2.0)

    found = judge.highest(holds, 1.0, floor=0.1)
    assert found is not None
    assert 1.8 <= found <= 2.0


def test_a_result_is_kept_whole_and_json_has_no_infinity(tmp_path: Path) -> None:
    state = State(tmp_path / "results")
    assert state.get("sweep a, b") is None
    state.put("sweep a, b", {"itl_p99_s": math.inf})
    assert state.get("sweep a, b") == {"itl_p99_s": math.inf}
    assert not list((tmp_path / "results").glob("*.part"))
    shown = judge.finite({"a": [math.inf, 1.0], "b": (math.nan, "x")})
    assert json.loads(json.dumps(shown, allow_nan=False)) == {"a": [None, 1.0], "b": [None, "x"]}


def test_what_runs_in_process_makes_the_same_rows_as_a_client() -> None:
    asked = _Asked("stream", due_s=100.0, prompt=32, new=3, token_s=[100.2, 100.3, 100.5], sent_s=100.05)
    request = measure(asked.record(zero_s=90.0))
    assert request.ok
    assert request.record.scheduled_s == 10.0
    assert request.ttft_s == pytest.approx(0.2), "from when it was due, not from when it was sent"
    assert request.itl_s == [pytest.approx(0.1), pytest.approx(0.2)]
    asked.token_s.pop()
    assert not measure(asked.record(zero_s=90.0)).ok, "a stream cut short is no success"


def test_in_process_a_token_that_is_held_back_comes_when_it_is_shown() -> None:
    asked = _Asked("stream", due_s=0.0, prompt=32, new=5, pacer=Pacer(Pace(interval_s=1.0, hold=2)))
    for made_s in (0.5, 0.6, 0.7):
        asked.take(made_s, 1, end=False)
    asked.take(3.0, 2, end=True)
    assert asked.token_s == [0.5, 1.5, 2.5, 3.0, 3.0]


def test_promises_follow_from_what_the_machine_gives() -> None:
    scenario = Scenario(prefill_s=2.0, gap_s=0.03, long_in=1000)
    assert scenario.classes["standard"] == scenario.classes["interactive"] == {"ttft_ms": 8000.0, "itl_ms": 90.0}
    assert scenario.slos == ("ttft <= 8000ms", "itl_p95 <= 90ms")
    # 500 prompt tokens are 1 s, 80 more tokens in a batch of eight 0.3 s.
    assert scenario.most_per_s([(500, 80)]) == pytest.approx(1 / 1.3)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_one_that_the_server_takes(variant: Variant) -> None:
    flags = variant.flags({"standard": {"ttft_ms": 7000.0, "itl_ms": 90.0}})
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    scheduler = resolve(given).settings.scheduler
    policy = make_policy(scheduler.policy, scheduler.policy_options)
    assert all(getattr(policy, name) == value for name, value in variant.options.items())
    assert scheduler.max_num_batched_tokens == (variant.budget or 2048)
    assert next(kind.itl_s for kind in scheduler.classes if kind.name == "standard") == 0.09


def test_variants_have_names_of_their_own_and_vendors_defaults_are_as_they_come() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert {variant.preset for variant in VARIANTS if variant.vendor_default} == {"vllm", "sglang", "trtllm-noevict"}
    assert all(not v.options or v.name == "sglang, lpm" for v in VARIANTS if v.vendor_default)
    assert LEAN[0] is SMOKE[0] is SLO


def test_lengths_of_the_trace_are_scaled_and_never_zero(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\nx,7,3\n")
    assert list(trace_lengths(trace)) == [(46, 5), (1, 1)]
    assert list(trace_lengths(trace, limit=1)) == [(46, 5)]


def test_keys_of_the_tenants_open_the_server_and_are_private(tmp_path: Path) -> None:
    keys, places = write_keys(tmp_path / "keys")
    read = {key.tenant: key.sha256 for key in read_key_file(keys.read_text())}
    for tenant, place in places.items():
        file = Path(place.removeprefix("file:"))
        assert read[tenant] == hash_key(file.read_text())
        assert file.stat().st_mode & 0o077 == 0
