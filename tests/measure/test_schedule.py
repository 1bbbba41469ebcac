"""Arrival schedules: one seed one list, the right counts, rates that follow their profile."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target, Trace, parse_length
from paceline.measure.schedule import Arrival, build_schedule, encode, rate_segments, read_schedule, warp


def plan(load: Load, **more: Any) -> BenchPlan:
    return BenchPlan(target=Target(url="http://127.0.0.1:1"), load=load, **more)


def times(load: Load, seed: int = 0) -> list[float]:
    return [arrival.at_s or 0.0 for arrival in build_schedule(plan(load, seed=seed))]


def gaps(values: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(values)]


def test_constant_arrivals_have_equal_gaps_and_the_exact_count() -> None:
    at = times(Load(arrivals=Arrivals.CONSTANT, rate=10, duration_s=100))
    assert len(at) == 1000
    assert at == [i / 10 for i in range(1000)]
    assert statistics.pstdev(gaps(at)) < 1e-12


def test_poisson_gaps_are_distinct_and_counts_disperse_like_poisson() -> None:
    at = times(Load(rate=50, duration_s=200))
    assert len(set(gaps(at))) == len(at) - 1
    counts = [0] * 200
    for moment in at:
        counts[int(moment)] += 1
    dispersion = statistics.pvariance(counts) / statistics.fmean(counts)
    assert 0.7 < dispersion < 1.35
    assert abs(len(at) - 10_000) < 400


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_of_the_rate_and_the_stated_spread(burstiness: float) -> None:
    at = times(Load(arrivals=Arrivals.GAMMA, burstiness=burstiness, rate=20, requests=20_000))
    between = gaps(at)
    mean = statistics.fmean(between)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(between) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_a_ramp_carries_the_area_under_its_line() -> None:
    at = times(Load(arrivals=Arrivals.CONSTANT, rate=2, ramp_to=10, duration_s=100))
    assert len(at) == pytest.approx(600, abs=1)
    first, second = sum(t < 50 for t in at), sum(t >= 50 for t in at)
    assert first == pytest.approx(200, abs=1)  # 2..6 per second over 50 s
    assert second == pytest.approx(400, abs=1)
    assert at == sorted(at)


def test_a_falling_ramp_to_almost_nothing_stays_finite() -> None:
    at = times(Load(arrivals=Arrivals.CONSTANT, rate=10, ramp_to=1e-9, duration_s=20))
    assert len(at) == pytest.approx(100, abs=1)
    assert all(math.isfinite(t) and t < 20 for t in at)


def test_bursts_replace_the_base_rate_in_their_windows() -> None:
    load = Load(arrivals=Arrivals.CONSTANT, rate=5, burst_rate=100, burst_every_s=10, burst_for_s=1, duration_s=41)
    at = times(load)
    for start in (10, 20, 30, 40):
        assert sum(start <= t < start + 1 for t in at) == pytest.approx(100, abs=1)
    assert sum(12 <= t < 20 for t in at) == pytest.approx(40, abs=1)


@given(
    st.floats(0.5, 50),
    st.none() | st.floats(0.5, 50),
    st.none() | st.floats(0.5, 50),
    st.floats(2, 20),
    st.floats(0.1, 1.5),
)
@settings(max_examples=60, deadline=None)
def test_the_cumulative_rate_is_inverted_exactly(
    rate: float, ramp: float | None, burst: float | None, every: float, length: float
) -> None:
    load = Load(
        arrivals=Arrivals.CONSTANT,
        rate=rate,
        ramp_to=ramp,
        burst_rate=burst,
        burst_every_s=every,
        burst_for_s=length,
        duration_s=30.0,
    )
    pieces = list(itertools.islice(rate_segments(load), 40))
    assert pieces[0][0] == 0.0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))

    def mass_until(t: float) -> float:
        total = 0.0
        for start, end, first, last in pieces:
            stop = min(end, t)
            if stop <= start:
                break
            slope = 0.0 if math.isinf(end) else (last - first) / (end - start)
            total += first * (stop - start) + slope * (stop - start) ** 2 / 2
        return total

    units = [0.0, 0.3, 1.0, 2.5, 7.25, 11.0]
    for unit, at in zip(units, warp(iter(units), iter(pieces)), strict=False):
        assert mass_until(at) == pytest.approx(unit, abs=1e-6)


def test_one_seed_is_one_run_and_another_seed_another() -> None:
    load = Load(rate=20, requests=200)
    prompts = Prompts(
        input=Length(kind="lognormal", value=300, sigma=0.7), output=Length(kind="uniform", low=5, high=90)
    )
    first = encode(build_schedule(plan(load, prompts=prompts, seed=3)))
    assert first == encode(build_schedule(plan(load, prompts=prompts, seed=3)))
    assert first != encode(build_schedule(plan(load, prompts=prompts, seed=4)))


def test_lengths_do_not_move_when_the_rate_does() -> None:
    prompts = Prompts(input=Length(kind="uniform", low=1, high=10_000))
    slow = build_schedule(plan(Load(rate=1, requests=50), prompts=prompts))
    fast = build_schedule(plan(Load(rate=9, requests=50), prompts=prompts))
    assert [a.inputs for a in slow] == [a.inputs for a in fast]


def test_lengths_keep_to_their_kind() -> None:
    prompts = Prompts(
        input=Length(kind="lognormal", value=500, sigma=1.0, low=10, high=2000),
        output=Length(kind="uniform", low=5, high=9),
    )
    arrivals = build_schedule(plan(Load(rate=10, requests=3000), prompts=prompts))
    inputs = [a.inputs[0] or 0 for a in arrivals]
    assert min(inputs) >= 10
    assert max(inputs) == 2000
    assert statistics.median(inputs) == pytest.approx(500, rel=0.1)
    assert {a.outputs[0] for a in arrivals} == {5, 6, 7, 8, 9}


def test_prefixes_come_with_their_share_and_from_all_groups() -> None:
    prompts = Prompts(input=Length(value=100), prefix_tokens=60, prefix_groups=4, prefix_share=0.25)
    arrivals = build_schedule(plan(Load(rate=10, requests=4000), prompts=prompts))
    shared = [a for a in arrivals if a.prefix]
    assert len(shared) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {a.prefix for a in shared} == {f"prefix-{i}" for i in range(4)}
    assert all(a.prefix_tokens == 60 for a in shared)


def test_conversations_have_turns_and_think_times() -> None:
    prompts = Prompts(
        input=Length(value=100),
        turns=Length(kind="uniform", low=2, high=4),
        think=Length(value=1500, low=0),
        turn_input=Length(value=20),
    )
    arrivals = build_schedule(plan(Load(rate=10, requests=100), prompts=prompts))
    assert {a.turns for a in arrivals} == {2, 3, 4}
    for arrival in arrivals:
        assert arrival.inputs == (100,) + (20,) * (arrival.turns - 1)
        assert arrival.thinks_s == (1.5,) * (arrival.turns - 1)


def test_closed_loops_have_no_times() -> None:
    arrivals = build_schedule(plan(Load(arrivals=Arrivals.CLOSED, concurrency=4, requests=10)))
    assert [a.at_s for a in arrivals] == [None] * 10


def test_traces_give_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"at_s": 5, "input_tokens": 10, "output_tokens": 3}\n{"at_s": 4, "input_tokens": 20}\n')
    load = Load(arrivals=Arrivals.TRACE)
    arrivals = build_schedule(plan(load, trace=Trace(path=str(path)), prompts=Prompts(output=Length(value=77))))
    assert [(a.at_s, a.inputs, a.outputs) for a in arrivals] == [(0.0, (20,), (77,)), (1.0, (10,), (3,))]


def test_the_schedule_survives_its_file(tmp_path: Path) -> None:
    arrivals = build_schedule(plan(Load(rate=10, requests=20), prompts=Prompts(turns=Length(value=3))))
    path = tmp_path / "schedule.jsonl"
    path.write_bytes(encode(arrivals))
    assert read_schedule(path) == arrivals
    assert isinstance(arrivals[0], Arrival)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load(rate=0, requests=1), "impossible rate"),
        (Load(rate=-1, requests=1), "impossible rate"),
        (Load(rate=math.nan, requests=1), "impossible rate"),
        (Load(rate=math.inf, requests=1), "impossible rate"),
        (Load(rate=1e9, requests=1), "impossible rate"),
        (Load(rate=1, duration_s=0), "duration"),
        (Load(rate=1, duration_s=math.inf), "duration"),
        (Load(rate=1), "when to stop"),
        (Load(requests=1), "needs a rate"),
        (Load(rate=1, requests=0), "requests"),
        (Load(rate=1, ramp_to=2, requests=5), "ramp"),
        (Load(rate=1, requests=1, max_concurrency=0), "cap"),
        (Load(rate=1, requests=5, arrivals=Arrivals.GAMMA, burstiness=0), "burstiness"),
        (Load(arrivals=Arrivals.CLOSED, requests=5), "concurrency"),
        (Load(arrivals=Arrivals.CLOSED, concurrency=2, rate=3, requests=5), "rate"),
        (Load(arrivals=Arrivals.TRACE), "trace"),
        (Load(rate=0.001, duration_s=0.001), "empty"),
        (Load(rate=1e6, duration_s=1000), "impossible rate"),
    ],
)
def test_plans_that_cannot_run_are_refused_in_one_line(load: Load, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_schedule(plan(load))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("512", Length(value=512)),
        ("uniform:3:9", Length(kind="uniform", value=6, low=3, high=9)),
        ("lognormal:300:0.8", Length(kind="lognormal", value=300, sigma=0.8)),
        ("lognormal:300:0.8:900", Length(kind="lognormal", value=300, sigma=0.8, high=900)),
    ],
)
def test_lengths_are_read(text: str, length: Length) -> None:
    assert parse_length(text) == length


@pytest.mark.parametrize(
    "text", ["", "x", "-3", "1.5", "uniform:9:3", "uniform:1", "lognormal:1", "lognormal:1:x", "pareto:1:2"]
)
def test_lengths_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_length(text)
