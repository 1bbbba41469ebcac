"""Sampling against its definition: the same tokens but where a draw is reported to be near a boundary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paceline_native as native
import pytest
from paceline_native.contracts_sample import BOUNDARY, SAMPLE, keep, weights

from conftest import astray, floats

FILTERS: dict[str, tuple[int, float, float]] = {  # top_k, top_p, min_p
    "none": (0, 1.0, 0.0),
    "top_k 1": (1, 1.0, 0.0),
    "top_k 50": (50, 1.0, 0.0),
    "top_k 10000": (10_000, 1.0, 0.0),
    "top_p 0": (0, 0.0, 0.0),
    "top_p 1e-9": (0, 1e-9, 0.0),
    "top_p 0.9": (0, 0.9, 0.0),
    "top_p 0.999": (0, 0.999, 0.0),
    "top_p 0.999999": (0, 0.999999, 0.0),
    "min_p 0.1": (0, 1.0, 0.1),
    "min_p 1": (0, 1.0, 1.0),
    "min_p 2": (0, 1.0, 2.0),
    "all": (40, 0.8, 0.02),
    "top_p, min_p": (0, 0.95, 0.05),
}
TEMPERATURES = (1e-300, 1e-6, 0.3, 1.0, 100.0, 1e300)


def draw(
    logits: Any, temperature: Any = 1.0, filters: Any = FILTERS["none"], uniform: Any = 0.5
) -> tuple[list[int], list[bool]]:
    """(tokens, near); a number stands for all rows."""
    arguments = parameters(len(logits), temperature, filters, uniform)
    tokens, near = np.full(len(logits), -9, dtype=np.int64), np.full(len(logits), 9, dtype=np.uint8)
    native.sample(astray(logits), *arguments, tokens, near)
    assert set(near.tolist()) <= {0, 1}
    return tokens.tolist(), near.astype(bool).tolist()


def parameters(rows: int, temperature: Any, filters: Any, uniform: Any) -> tuple[Any, ...]:
    values = zip(
        (temperature, *filters, uniform), (np.float64, np.int64, np.float64, np.float64, np.float64), strict=True
    )
    return tuple(np.array(np.broadcast_to(value, rows), dtype=dtype) for value, dtype in values)


def ids(sizes: dict[str, int]) -> str:
    return "x".join(map(str, sizes.values()))


@pytest.mark.parametrize("sizes", SAMPLE.samples, ids=ids)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_the_token_of_the_definition(
    isa: str, threads: int, random: np.random.Generator, sizes: dict[str, int], filters: Any
) -> None:
    rows = sizes["rows"]
    sure = 0
    for spread in (0.0, 1.0, 6.0):
        x = spread * floats(random, rows, sizes["columns"])
        for temperature in TEMPERATURES if sizes["columns"] < 1000 else (0.3, 1.0):
            uniform = random.random(rows)
            tokens, near = draw(x, temperature, filters, uniform)
            want = SAMPLE.reference(x, *parameters(rows, temperature, filters, uniform))
            assert all(a == b or unsure for a, b, unsure in zip(tokens, want, near, strict=True))
            sure += rows - sum(near)
    assert sure >= rows  # a kernel that calls every draw near would pass else


@pytest.mark.parametrize("case", range(60))
def test_the_token_of_the_definition_for_any_row(isa: str, case: int) -> None:
    """Random sizes, spreads, masks, ties and parameters, each row its own."""
    random = np.random.default_rng(case)
    rows, columns = 50, int(random.integers(1, 400))
    x = floats(random, rows, columns) * np.float32(random.choice([1e-4, 0.5, 3.0, 40.0]))
    if case % 3 == 0:
        x = np.round(x)  # ties
    if case % 4 == 0:
        x[random.random(x.shape) < 0.5] = -np.inf
        x[:, int(random.integers(columns))] = 1.0
    if case % 5 == 0:
        x += np.float32(300.0)
    temperature = random.choice([0.0, 1e-6, 0.2, 1.0, 1.7, 100.0], rows)
    filters = (
        random.choice([0, 0, 1, 2, 30, 399], rows),
        random.choice([1.0, 1.0, 0.99, 0.6, 1e-9], rows),
        random.choice([0.0, 0.0, 0.1, 1.0], rows),
    )
    uniform = random.random(rows)
    tokens, near = draw(x, temperature, filters, uniform)
    want = SAMPLE.reference(x, *parameters(rows, temperature, filters, uniform))
    assert all(a == b or unsure for a, b, unsure in zip(tokens, want, near, strict=True))


def chi_square(counts: Any, probabilities: Any) -> None:
    """Fail when counts deviate from their expectations more than once in about a million times."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    bins = expected > 5
    statistic = float(((counts[bins] - expected[bins]) ** 2 / expected[bins]).sum())
    freedom = max(int(bins.sum()) - 1, 1)
    # Wilson and Hilferty's normal approximation of the chi-square distribution, at five standard deviations.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_distribution(isa: str, random: np.random.Generator, filters: Any) -> None:
    logits = 1.5 * floats(random, 1, 700)
    kept = np.where(keep(logits[0], 1.2, *filters), weights(logits[0], 1.2), 0.0)
    tokens, _ = draw(np.broadcast_to(logits, (20_000, 700)), 1.2, filters, random.random(20_000))
    chi_square(np.bincount(tokens, minlength=700), kept / kept.sum())


def test_draws_at_a_boundary_are_reported_and_no_others(isa: str) -> None:
    logits = np.log(np.array([[1e-300, 1.0, 1e-300, 2.0, 1.0]])).astype(np.float32)
    logits[0, [0, 2]] = -np.inf

    def at(u: float) -> tuple[int, bool]:
        tokens, near = draw(logits, uniform=u)
        return tokens[0], near[0]

    assert at(0.0) == (1, False)  # nothing below the first token to turn into
    assert at(0.25 - 2e-5) == (1, False)
    assert at(0.25 - 5e-6)[1]
    assert at(0.25 + 5e-6)[1]
    assert at(0.25 + 2e-5) == (3, False)
    assert at(0.75 + 2e-5) == (4, False)
    assert at(1.0 - 2.0**-53) == (4, False)


@pytest.mark.parametrize(
    ("logits", "filters", "near"),
    [
        ((1.0, 1.0 - BOUNDARY / 2, 0.0, 0.0), (1, 1.0, 0.0), True),  # the two could change places
        ((1.0, 1.0 - BOUNDARY * 3, 0.0, 0.0), (1, 1.0, 0.0), False),
        ((1.0, 1.0, 0.0, 0.0), (0, 0.0, 0.0), True),
        ((math.log(0.5), math.log(0.25), math.log(0.25)), (0, 0.5, 0.0), True),  # a second token may be needed
        ((math.log(0.5), math.log(0.25), math.log(0.25)), (0, 0.4, 0.0), False),
        ((0.0, math.log(0.1) + 2e-6), (0, 1.0, 0.1), True),
        ((0.0, math.log(0.1) + 2e-4), (0, 1.0, 0.01), False),
        ((3.0, 1.0), (0, 0.0, 0.0), False),  # the best token always stays
        ((3.0, 1.0), (0, 1.0, 1.0), False),
    ],
)
def test_membership_in_doubt_is_reported(isa: str, logits: Any, filters: Any, near: bool) -> None:
    # Low in the first token's interval, within any weight in doubt of its edge.
    assert draw(np.array([logits], dtype=np.float32), 1.0, filters, 5e-3)[1] == [near]


@pytest.mark.parametrize("columns", [2, 31, 49152])
def test_noise_turns_a_draw_only_where_it_is_reported(isa: str, random: np.random.Generator, columns: int) -> None:
    rows = 3 if columns > 1000 else 3000
    x = 2 * floats(random, rows, columns)
    noise = np.linspace(-4e-6, 4e-6, columns, dtype=np.float32)
    for filters in FILTERS.values():
        uniform = random.random(rows)
        before, near = draw(x, 1.0, filters, uniform)
        after, _ = draw(x + noise, 1.0, filters, uniform)
        assert all(a == b or unsure for a, b, unsure in zip(before, after, near, strict=True))


@pytest.mark.parametrize("columns", [1, 2, 31, 49152, 151936])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_one_allowed_token_is_the_token(isa: str, columns: int, filters: Any) -> None:
    x = np.full((3, columns), -np.inf, dtype=np.float32)
    x[:, columns // 2] = (-1e30, 0.0, 3e38)
    for temperature in (0.0, *TEMPERATURES):
        assert draw(x, temperature, filters, 0.99) == ([columns // 2] * 3, [False] * 3)


def test_greedy_takes_the_first_of_the_highest(isa: str, threads: int, random: np.random.Generator) -> None:
    for sizes in SAMPLE.samples:
        x = np.round(floats(random, sizes["rows"], sizes["columns"]))
        assert draw(x, 0.0) == (x.argmax(axis=1).tolist(), [False] * len(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("columns", [1, 40, 64, 1100])
def test_a_row_that_is_not_sound_is_told_and_touches_no_other(
    isa: str, threads: int, random: np.random.Generator, bad: float, columns: int
) -> None:
    for filters in FILTERS.values():
        for temperature in (0.0, 1.0):
            x = floats(random, 40, columns)
            uniform = random.random(40)
            want, near = draw(x, temperature, filters, uniform)
            for place in {0, columns // 2, columns - 1}:
                spoiled = x.copy()
                spoiled[17, place if bad > 0 or bad != bad else slice(None)] = bad
                tokens, flags = draw(spoiled, temperature, filters, uniform)
                assert (tokens[17], flags[17]) == (-1, False)
                assert tokens[:17] + tokens[18:] == want[:17] + want[18:]
                assert flags[:17] + flags[18:] == near[:17] + near[18:]


def test_threads_change_nothing(isa: str, random: np.random.Generator) -> None:
    x, uniform = 2 * floats(random, 64, 1100), random.random(64)
    before = native.threads()
    found = []
    for count in (1, 3):
        native.set_threads(count, spin_us=5)
        found.append([draw(x, 0.9, filters, uniform) for filters in FILTERS.values()])
    native.set_threads(**before)
    assert found[0] == found[1]


def test_errors_name_the_argument(random: np.random.Generator) -> None:
    x = floats(random, 2, 8)
    tokens, near = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.uint8)

    def call(temperature: float = 1.0, uniform: float = 0.5, tokens: Any = tokens, near: Any = near) -> None:
        native.sample(x, *parameters(2, temperature, FILTERS["none"], uniform), tokens, near)

    with pytest.raises(ValueError, match="temperature of row 0 is -1"):
        call(temperature=-1.0)
    with pytest.raises(ValueError, match="temperature of row 0 is nan"):
        call(temperature=math.nan)
    with pytest.raises(ValueError, match=r"uniform of row 0 is 1.* in \[0, 1\)"):
        call(uniform=1.0)
    with pytest.raises(ValueError, match="tokens has 1"):
        call(tokens=tokens[:1])
    with pytest.raises(TypeError, match="near must be a uint8"):
        call(near=tokens)
