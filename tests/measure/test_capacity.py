"""The capacity search against servers whose capacity is known, noisy ones too."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.measure.capacity import Answer, Capacity, SearchSettings, find_capacity

Trial = Callable[[float, int], tuple[Answer, str, str]]


def server(limit: float) -> Trial:
    """Holds up to a limit, always."""
    return lambda rate, attempt: (Answer.HOLDS if rate <= limit else Answer.FAILS, "", "")


def noisy(limit: float, seed: int, blur: float = 0.15) -> Trial:
    """Within `blur` of the limit a run cannot tell, and now and then tells wrongly."""
    rng = random.Random(seed)

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        if abs(rate / limit - 1) < blur:
            return rng.choice([Answer.OPEN, Answer.OPEN, Answer.HOLDS if rate <= limit else Answer.FAILS]), "", ""
        return (Answer.HOLDS if rate <= limit else Answer.FAILS), "", ""

    return trial


@given(st.floats(0.2, 900))
@settings(max_examples=80)
def test_a_sharp_limit_is_found_within_the_resolution(limit: float) -> None:
    found = find_capacity(server(limit), SearchSettings(low=0.1, high=1000))
    assert found.best is not None
    assert found.failed_at is not None
    assert found.best <= limit < found.failed_at * 1.001
    assert found.failed_at / found.best <= 1.0501
    assert found.limited_by == "server"
    assert len(found.trials) < 30


def test_where_nothing_holds_the_answer_is_none() -> None:
    found = find_capacity(server(0.01), SearchSettings(low=0.5))
    assert found.best is None
    assert "none" in found.why
    assert len(found.trials) == 1


def test_where_everything_holds_the_range_ends_the_search() -> None:
    found = find_capacity(server(1e9), SearchSettings(low=1, high=50))
    assert (found.best, found.failed_at, found.limited_by) == (50, None, "range")


@given(st.integers(0, 10_000), st.floats(2, 200))
@settings(max_examples=60)
def test_noise_never_gives_more_than_the_limit(seed: int, limit: float) -> None:
    found = find_capacity(noisy(limit, seed), SearchSettings(low=0.5, high=1000))
    assert found.best is not None
    assert found.best <= limit
    assert found.best >= limit * 0.5


def test_what_cannot_be_told_is_tried_again_and_then_counts_as_failed() -> None:
    found = find_capacity(lambda rate, attempt: (Answer.OPEN, "thin", ""), SearchSettings(low=1, attempts=3))
    assert found.best is None
    assert [t.attempt for t in found.trials] == [0, 1, 2]
    assert found.undecided
    assert found.why == "none: 1/s could not be told in 3 runs (more requests a run would tell)"


def test_a_rate_that_could_not_be_told_is_not_called_failed() -> None:
    def blurred(rate: float, attempt: int) -> tuple[Answer, str, str]:
        return (Answer.HOLDS if rate <= 4.2 else Answer.OPEN if rate < 6 else Answer.FAILS), "", ""

    found = find_capacity(blurred, SearchSettings(low=1, high=100))
    assert found.undecided
    assert (
        found.why
        == f"{found.best:g}/s holds, {found.failed_at:g}/s could not be told in 3 runs (more requests a run would tell)"
    )
    sharp = find_capacity(server(4.2), SearchSettings(low=1, high=100))
    assert not sharp.undecided
    assert sharp.why == f"{sharp.best:g}/s holds, {sharp.failed_at:.4g}/s does not"


def test_a_lucky_run_is_not_confirmed() -> None:
    """The first run at 8 holds by luck; its confirmation does not, and the search goes on below."""

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        lucky = 7 < rate < 9 and attempt == 0
        return (Answer.HOLDS if rate <= 4.2 or lucky else Answer.FAILS), "", ""

    found = find_capacity(trial, SearchSettings(low=1, high=100))
    assert found.best is not None
    assert found.best <= 4.2
    assert found.best > 3.9
    assert any(t.confirming and t.answer is Answer.FAILS for t in found.trials)


def test_a_client_at_its_limit_ends_the_search_with_what_held() -> None:
    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        return (Answer.HOLDS if rate <= 10 else Answer.INVALID), "late", ""

    found = find_capacity(trial, SearchSettings(low=1))
    assert found.limited_by == "client"
    assert found.best == 8
    assert "late" in found.why
    assert "at least 8/s held, unconfirmed" in found.why


def test_a_run_that_the_client_spoilt_is_repeated() -> None:
    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        if attempt == 0:
            return Answer.INVALID, "the machine was busy", ""
        return (Answer.HOLDS if rate <= 10 else Answer.FAILS), "", ""

    found = find_capacity(trial, SearchSettings(low=1, high=100))
    assert found.best is not None
    assert 9.5 <= found.best <= 10
    assert found.limited_by == "server"


def test_a_user_who_stops_it() -> None:
    found: Capacity = find_capacity(lambda rate, attempt: (Answer.STOPPED, "", ""), SearchSettings())
    assert (found.best, found.limited_by, found.why, found.shown) == (None, "user", "stopped", "not known")


@pytest.mark.parametrize(
    ("turn", "best", "why", "shown"),
    [
        (2, 1, "stopped; at least 1/s held, unconfirmed", "at least 1 requests/s"),
        (4, 2, "stopped; at least 2/s held, unconfirmed; 4/s did not", "at least 2 requests/s"),
    ],
)
def test_a_user_who_stops_it_is_told_what_is_known(turn: int, best: float, why: str, shown: str) -> None:
    runs: list[float] = []

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        runs.append(rate)
        return Answer.STOPPED if len(runs) == turn else server(3.0)(rate, attempt)[0], "", ""

    found = find_capacity(trial, SearchSettings(low=1))
    assert (found.best, found.why, found.shown, found.limited_by) == (best, why, shown, "user")


@pytest.mark.parametrize(
    "bad",
    [
        SearchSettings(low=0),
        SearchSettings(low=10, high=5),
        SearchSettings(high=float("inf")),
        SearchSettings(resolution=0),
        SearchSettings(attempts=0),
        SearchSettings(growth=1),
    ],
)
def test_searches_that_make_no_sense(bad: SearchSettings) -> None:
    with pytest.raises(ConfigError):
        find_capacity(server(1), bad)
