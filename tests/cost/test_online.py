"""The online cost model finds the times behind the steps it sees."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.shape import StepShape
from paceline.cost.online import OnlineCost


def truth(shape: StepShape) -> float:
    """A machine: a floor of weights read, arithmetic beyond it, KV reads and prefill attention."""
    return 0.03 + 0.002 * min(shape.tokens, 16) + 0.0015 * shape.tokens + 2e-7 * shape.context + 2e-8 * shape.pairs


def decode(rng: random.Random, rows: int) -> StepShape:
    shape = StepShape()
    for _ in range(rows):
        shape = shape.plus(rng.randrange(20, 2000), 1)
    return shape


def mixed(rng: random.Random) -> StepShape:
    return decode(rng, rng.randrange(0, 16)).plus(rng.randrange(0, 1500), rng.randrange(2, 512))


def learn(model: OnlineCost, rng: random.Random, steps: int, noise: float = 0.0, slow: float = 1.0) -> None:
    for step in range(steps):
        shape = mixed(rng) if step % 5 == 0 else decode(rng, rng.randrange(1, 24))
        model.observe(shape, slow * truth(shape) * rng.lognormvariate(0.0, noise))


def worst_error(model: OnlineCost, rng: random.Random, scale: float = 1.0) -> float:
    shapes = [mixed(rng) for _ in range(50)] + [decode(rng, rng.randrange(1, 24)) for _ in range(50)]
    return max(abs(model.predict(shape).seconds / (scale * truth(shape)) - 1.0) for shape in shapes)


def test_it_finds_an_exact_law() -> None:
    rng = random.Random(1)
    model = OnlineCost()
    assert not model.ready
    learn(model, rng, 400)
    assert model.ready
    assert worst_error(model, rng) < 0.02


def test_noise_and_outliers_do_not_carry_it_away() -> None:
    rng = random.Random(2)
    model = OnlineCost()
    learn(model, rng, 600, noise=0.05)
    for _ in range(40):
        model.observe(decode(rng, 8), 2.0)  # a neighbour on the machine
        learn(model, rng, 10, noise=0.05)
    assert worst_error(model, rng) < 0.15
    median, p95 = model.errors()
    assert 0.0 < median < 0.10
    assert median < p95


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(3)
    model = OnlineCost()
    learn(model, rng, 500, noise=0.02)
    learn(model, rng, 3000, noise=0.02, slow=1.6)
    assert worst_error(model, rng, scale=1.6) < 0.1


def test_an_hour_of_decoding_does_not_forget_prefills() -> None:
    rng = random.Random(4)
    model = OnlineCost()
    learn(model, rng, 400)
    for _ in range(5000):
        shape = decode(rng, 8)
        model.observe(shape, truth(shape))
    shapes = [mixed(rng) for _ in range(50)]
    assert max(abs(model.predict(shape).seconds / truth(shape) - 1.0) for shape in shapes) < 0.1


def test_the_range_holds_nine_in_ten() -> None:
    rng = random.Random(5)
    model = OnlineCost()
    learn(model, rng, 1000, noise=0.1)
    inside = 0
    for _ in range(400):
        shape = decode(rng, rng.randrange(1, 24))
        estimate = model.predict(shape)
        inside += estimate.low <= truth(shape) * rng.lognormvariate(0.0, 0.1) <= estimate.high
    assert 0.82 < inside / 400 < 0.97


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4000), st.integers(1, 2048), st.floats(1e-4, 10.0))))
def test_any_history_gives_finite_monotone_answers(steps: list[tuple[int, int, int, float]]) -> None:
    model = OnlineCost()
    for rows, start, count, seconds in steps:
        shape = StepShape()
        for _ in range(rows - 1):
            shape = shape.plus(start, 1)
        model.observe(shape.plus(start, count), seconds)
    base = StepShape().plus(100, 1)
    times = [model.predict(base.plus(0, count)).seconds for count in (2, 8, 64, 512, 2048)]
    assert times == sorted(times), "more tokens never take less time"
    assert all(0.0 <= time < float("inf") for time in times)
