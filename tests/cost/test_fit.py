"""The offline fit: it finds the law behind recorded steps, knows how sure it is, and survives its file."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.calllog import RecordedScheduler
from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.shape import StepShape
from paceline.core.step import RequestSpec, StepResult
from paceline.cost.beside import Beside, Toll
from paceline.cost.fit import Calibration, Overheads, fit, load_calibration
from paceline.cost.fitted import QUANTILES, Band, FittedCost, Term
from paceline.cost.nonnegative import solve_non_negative
from paceline.cost.recorded import StepRow, read_call_times, rows_of_timeline
from paceline.errors import ConfigError

np = pytest.importorskip("numpy")


def truth(shape: StepShape) -> float:
    """A machine whose matrix multiplies are bound by weights up to 24 tokens and slow down beyond 300."""
    compute = 0.0008 * max(shape.tokens, 24) + 0.0003 * max(0, shape.tokens - 300)
    return 0.004 + compute + 0.0003 * shape.rows + 3e-6 * shape.context + 3e-7 * shape.pairs


def draw_shape(rng: random.Random) -> StepShape:
    shape = StepShape()
    for _ in range(rng.choice((0, 1, 2, 4, 8, 16, 32))):
        shape = shape.plus(rng.randrange(1, 2000), 1)
    if rng.random() < 0.4 or not shape.rows:
        shape = shape.plus(rng.choice((0, 256, 1024)), round(2 ** rng.uniform(1, 10)))
    return shape


def recorded(rng: random.Random, count: int, noise: Callable[[], float] = lambda: 1.0) -> list[StepRow]:
    shapes = [draw_shape(rng) for _ in range(count)]
    return [StepRow(shape, truth(shape) * noise()) for shape in shapes]


def worst(cost: FittedCost, rng: random.Random) -> float:
    return max(abs(cost.seconds(shape) / truth(shape) - 1.0) for shape in (draw_shape(rng) for _ in range(200)))


def test_it_finds_the_law_behind_the_steps() -> None:
    rng = random.Random(1)
    cost = fit(recorded(rng, 400))
    assert worst(cost, rng) < 0.06, "knots of the law lie between those of the model"
    median, p95 = cost.errors()
    assert median < 0.01
    assert median < p95 < 0.06


def test_steps_that_a_neighbour_slowed_down_do_not_pull() -> None:
    rng = random.Random(2)
    cost = fit(recorded(rng, 600, lambda: 20.0 if rng.random() < 0.08 else rng.lognormvariate(0.0, 0.03)))
    assert worst(cost, rng) < 0.12


def test_the_interval_holds_nine_in_ten_of_each_kind() -> None:
    rng = random.Random(3)

    def noisy(shape: StepShape) -> float:
        return truth(shape) * rng.lognormvariate(0.0, 0.15 if shape.pairs else 0.03)

    shapes = [draw_shape(rng) for _ in range(1500)]
    cost = fit([(shape, noisy(shape)) for shape in shapes])
    for is_prefill in (False, True):
        fresh = [shape for shape in (draw_shape(rng) for _ in range(3000)) if bool(shape.pairs) == is_prefill]
        inside = 0
        for shape in fresh:
            estimate = cost.predict(shape)
            inside += estimate.low <= noisy(shape) <= estimate.high
        assert 0.84 < inside / len(fresh) < 0.96, "wide where it is noisy, narrow where it is not"


def test_it_says_when_it_is_asked_outside() -> None:
    cost = fit(recorded(random.Random(4), 300))
    assert cost.ready
    assert cost.predict(StepShape().plus(100, 1)).known
    assert not cost.predict(StepShape().plus(0, 8000)).known
    assert not cost.predict(StepShape(tokens=100, rows=100, context=100)).known
    decodes_only = fit([row for row in recorded(random.Random(5), 300) if not row.shape.pairs])
    assert not decodes_only.predict(StepShape().plus(0, 8)).known, "no prefill was ever seen"


def test_drawn_times_are_as_uneven_as_the_machine() -> None:
    rng = random.Random(6)
    rows = recorded(rng, 2000, lambda: 1.5 if rng.random() < 0.2 else 1.0)
    cost = fit(rows)
    shape = StepShape().plus(500, 1).plus(700, 1)
    noise = cost.noise(random.Random(7))
    drawn = [noise.draw(shape) / truth(shape) for _ in range(4000)]
    assert 0.1 < statistics.fmean(ratio > 1.3 for ratio in drawn) < 0.3, "two humps, not a bell"
    again = cost.noise(random.Random(7))
    assert [again.draw(shape) / truth(shape) for _ in range(50)] == drawn[:50]
    assert cost.persistence < 0.1


def test_slow_moments_last() -> None:
    rng = random.Random(8)
    state, at_s, rows = 0.0, 0.0, []
    for _ in range(2000):
        state = 0.9 * state + math.sqrt(1 - 0.81) * rng.gauss(0.0, 1.0)
        shape = draw_shape(rng)
        seconds = truth(shape) * math.exp(0.1 * state)
        at_s += seconds
        rows.append(StepRow(shape, seconds, at_s))
    cost = fit(rows)
    assert 0.75 < cost.persistence < 0.97
    noise = cost.noise(random.Random(9))
    drawn = [math.log(noise.draw(StepShape().plus(500, 1))) for _ in range(3000)]
    assert 0.7 < statistics.correlation(drawn[:-1], drawn[1:]) < 0.98


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 4000), st.integers(1, 2048), st.floats(1e-4, 10.0)),
        min_size=30,
        max_size=60,
    )
)
def test_any_recording_gives_finite_monotone_answers(steps: list[tuple[int, int, int, float]]) -> None:
    rows = []
    for count, start, tokens, seconds in steps:
        shape = StepShape()
        for _ in range(count - 1):
            shape = shape.plus(start, 1)
        rows.append((shape.plus(start, tokens), seconds))
    cost = fit(rows)
    base = StepShape().plus(100, 1)
    times = [cost.predict(base.plus(0, count)).seconds for count in (2, 8, 64, 512, 2048)]
    assert times == sorted(times), "more tokens never take less time"
    for shape, _ in rows:
        estimate = cost.predict(shape)
        assert 0.0 <= estimate.low <= estimate.high < math.inf
        assert estimate.known


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_solver_meets_the_conditions_of_an_optimum(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(3 * size, size)), rng.normal(size=3 * size)
    weights = solve_non_negative(a.T @ a, a.T @ b)
    gradient = a.T @ (a @ weights - b)
    assert (weights >= 0.0).all()
    assert (gradient >= -1e-6).all(), "no weight should grow"
    assert (abs(gradient[weights > 0.0]) < 1e-6).all(), "none that is there should change"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("step", "rows", "chunk", "context", "pairs", "tokens_to", "tokens_beyond")),
            st.sampled_from((0.0, 2.0, 3.0, 16.0, 100.0)),
            st.floats(0.0, 1.0),
        ),
        max_size=12,
    ),
    st.integers(1, 200),
    st.integers(0, 1),
)
def test_the_quick_sum_is_the_sum_of_the_terms(
    terms: list[tuple[str, float, float]], tokens: int, chunked: int
) -> None:
    band = Band("decode", 1.0, 1, (1.0,) * len(QUANTILES))
    cost = FittedCost([Term(*term) for term in terms], [band], {})
    shape = StepShape(tokens, 3, 500, 77 * chunked)
    told = sum(term.weight * term.value(shape) for term in cost.terms)
    assert cost.seconds(shape) == pytest.approx(told, abs=1e-9)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="29 recorded steps are too few"):
        fit(recorded(random.Random(1), 29))


# The file -------------------------------------------------------------------------------------------------------------


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    rng = random.Random(10)
    cost = fit(recorded(rng, 300, lambda: rng.lognormvariate(0.0, 0.05)))
    made = Calibration(cost, Overheads(0.002, 1e-6, 0.001, 5e-5), {"num_blocks": 100}, {"created": "today"})
    path = tmp_path / "calibration.json"
    made.save(path)
    read = load_calibration(path)
    assert read.to_row() == made.to_row()
    shape = StepShape().plus(10, 1).plus(0, 77)
    assert read.cost.predict(shape) == cost.predict(shape)
    assert read.cost.noise(random.Random(1)).draw(shape) == cost.noise(random.Random(1)).draw(shape)
    assert list(tmp_path.iterdir()) == [path], "no scratch file is left"
    with pytest.raises(ConfigError, match="cannot write"):
        made.save(tmp_path / "no" / "calibration.json")


def damage(row: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**row, **changes})


def test_what_is_no_calibration_is_refused_by_name(tmp_path: Path) -> None:
    row = Calibration(fit(recorded(random.Random(11), 100))).to_row()
    cost = row["cost"]
    bad = {
        "not a calibration: it is not JSON": "{",
        "not a calibration: `paceline calibrate`": "[1]",
        "is of version 99": damage(row, version=99),
        "damaged: the cost model cannot be read: KeyError": damage(row, cost={}),
        "no feature 'colour'": damage(row, cost={**cost, "terms": [["colour", 0, 1.0]]}),
        "negative or not finite": damage(row, cost={**cost, "terms": [["step", 0, -1.0]]}),
        "do not have the quantiles": damage(row, cost={**cost, "bands": []}),
        "beside.sent_s is -1": damage(row, cost={**cost, "beside": {"sent_s": -1}}),
        "beside.sent_range_s is": damage(row, cost={**cost, "beside": {"sent_range_s": [0.0]}}),
        "is damaged": damage(row, overheads={"before_s": "soon"}),
    }
    path = tmp_path / "calibration.json"
    for message, text in bad.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_calibration(path)
    with pytest.raises(ConfigError, match="cannot read the calibration"):
        load_calibration(tmp_path / "none.json")
    path.write_text(damage(row, cost={name: value for name, value in cost.items() if name != "beside"}))
    assert load_calibration(path).cost.toll == Toll(), "a file from before there was one"


# Recordings -----------------------------------------------------------------------------------------------------------


def test_a_call_log_tells_shapes_times_and_requests(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    config = SchedulerConfig(num_blocks=64, max_model_len=256)
    with path.open("w") as file:
        scheduler = RecordedScheduler(config, file)
        now = _run(scheduler, "warm-up", 0.0)
        scheduler.start_over()
        _run(scheduler, "real", now + 5.0)
    found = read_call_times(path)
    assert found.config == config
    assert [row.shape for row in found.steps] == [
        StepShape().plus(0, 20),
        StepShape().plus(20, 1),
        StepShape().plus(21, 1),
    ]
    assert found.loop_s == pytest.approx(0.001)
    assert [row.seconds for row in found.steps] == pytest.approx([0.021, 0.021, 0.021]), "plan to commit, and the loop"
    assert list(found.requests) == ["real"], "the warm-up is nobody's traffic"
    times = found.requests["real"]
    assert times.idle
    assert times.prompt_tokens == 20
    assert [place for _, place in times.tokens] == [0, 0, 0]
    assert times.tokens[0][0] == pytest.approx(now + 5.0 + 0.02)


def test_a_step_of_a_busy_engine_lasts_from_commit_to_commit(tmp_path: Path) -> None:
    """The time between a commit and the next plan grows with what is sent and who comes, and clients wait for it."""
    path = tmp_path / "calls.jsonl"
    with path.open("w") as file:
        scheduler = RecordedScheduler(SchedulerConfig(num_blocks=64, max_model_len=256, policy="decode_first"), file)
        now = 0.0
        for number in range(3):
            scheduler.submit(RequestSpec(f"r{number}", (1, 2, 3), SamplingParams(max_tokens=4)), now)
        for step in range(4):
            plan = scheduler.plan(now)
            assert plan is not None
            scheduler.commit(plan, StepResult(plan.step, ((7,),) * len(plan.ids)), now + 0.02)
            now += 0.02
            if step == 1:  # it came while this step was computed, and is taken in now
                scheduler.submit(RequestSpec("late", (1,) * 9, SamplingParams(max_tokens=2), sent_s=now - 0.01), now)
            now += 0.005
    steps = read_call_times(path).steps
    assert [row.seconds for row in steps] == pytest.approx([0.025] * 4)
    sent = [Beside(0), Beside(3, 1, 9), Beside(3), Beside(4)]
    assert [row.beside for row in steps] == sent


def _run(scheduler: RecordedScheduler, name: str, now: float) -> float:
    """One request of 20 tokens and 3 answers; each step takes 20 ms and is planned 1 ms after the last commit."""
    scheduler.submit(RequestSpec(name, tuple(range(20)), SamplingParams(max_tokens=3)), now)
    while (plan := scheduler.plan(now)) is not None:
        now += 0.02
        scheduler.commit(plan, StepResult(plan.step, ((7,),) * len(plan.ids)), now)
        now += 0.001
    return now


def test_a_timeline_tells_the_same_and_an_old_one_is_refused() -> None:
    columns = ["step", "ended_s", "seconds", "prefill_tokens", "decode_tokens", "rows", "context", "pairs"]
    rows = [[1, 1.0, 0.1, 32, 0, 1, 32, 528], [2, 1.0505, 0.05, 0, 2, 2, 70, 0], [3, 9.0, 0.05, 0, 1, 1, 40, 0]]
    found = rows_of_timeline({"columns": columns, "rows": rows})
    assert [row.shape for row in found] == [
        StepShape(32, 1, 32, 528),
        StepShape(2, 2, 70, 0),
        StepShape(1, 1, 40, 0),
    ]
    assert [row.seconds for row in found] == pytest.approx([0.1, 0.0505, 0.05]), "the scheduler's time between is in"
    with pytest.raises(ConfigError, match="no column context, pairs"):
        rows_of_timeline({"columns": columns[:6], "rows": []})


def test_a_log_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 recorded steps"):
        fit([])
