"""The pace line: nothing lost, nothing early, no gap that the engine did not force."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pace import Pace, Pacer

PACES = st.builds(Pace, interval_s=st.floats(0.01, 2.0), hold=st.integers(1, 20))
STEPS = st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(1, 4)), min_size=1, max_size=60)


def play(pace: Pace, steps: list[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """When each token was made, and when it was shown."""
    pacer, now = Pacer(pace), 0.0
    made: list[float] = []
    shown: list[float] = []
    for number, (takes_s, count) in enumerate(steps):
        now += takes_s
        made += [now] * count
        shown += pacer.show(now, count, end=number == len(steps) - 1)
    return made, shown


@given(PACES, STEPS)
def test_every_token_is_shown_once_in_order_and_none_before_it_is_made(
    pace: Pace, steps: list[tuple[float, int]]
) -> None:
    made, shown = play(pace, steps)
    assert len(shown) == len(made)
    assert shown == sorted(shown)
    assert all(at >= born for at, born in zip(shown, made, strict=True))
    assert shown[0] == made[0], "the first token waits for nothing"
    assert shown[-1] == made[-1], "and the end shows all"


@given(PACES, STEPS)
def test_a_reader_never_waits_longer_than_the_interval_for_a_token_that_is_there(
    pace: Pace, steps: list[tuple[float, int]]
) -> None:
    made, shown = play(pace, steps)
    for number, (before, at) in enumerate(pairwise(shown), start=1):
        assert at <= max(made[number], before + pace.interval_s) + 1e-9


@given(PACES, STEPS)
def test_what_is_promised_while_tokens_are_held_comes_true(pace: Pace, steps: list[tuple[float, int]]) -> None:
    """`last_s` is when the scheduler believes the newest token shown: the deadline of the next one counts from it."""
    pacer, now = Pacer(pace), 0.0
    for takes_s, count in steps:
        now += takes_s
        pacer.add(now, count)
        assert pacer.held <= pace.hold
        last_s = pacer.last_s
        copy = Pacer(pace)
        copy.shown_s, copy.held = pacer.shown_s, pacer.held
        copy.advance(last_s + 1e-9)
        assert copy.held == 0
        assert copy.shown_s is not None
        assert abs(copy.shown_s - last_s) < 1e-9


@given(PACES, STEPS, st.lists(st.floats(0.0, 0.5), min_size=60, max_size=60))
def test_whoever_hears_of_tokens_later_shows_them_no_earlier(
    pace: Pace, steps: list[tuple[float, int]], delays: list[float]
) -> None:
    scheduler, client, now, heard = Pacer(pace), Pacer(pace), 0.0, 0.0
    here: list[float] = []
    there: list[float] = []
    for (takes_s, count), delay_s in zip(steps, delays, strict=False):
        now += takes_s
        heard = max(heard, now + delay_s)
        here += scheduler.show(now, count)
        there += client.show(heard, count)
    for early, late in zip(here, there, strict=False):
        assert late >= early - 1e-9


def test_undisturbed_a_stream_runs_at_the_speed_of_the_engine() -> None:
    _, shown = play(Pace(0.08, hold=4), [(0.02, 1)] * 50)
    gaps = [b - a for a, b in pairwise(shown)]
    assert all(abs(gap - 0.02) < 1e-9 for gap in gaps[10:-5]), "once enough is held"
    assert max(gaps) <= 0.08 + 1e-9, "and until then it is shown slowly"


def test_a_pause_is_bridged_by_what_is_held() -> None:
    _, shown = play(Pace(0.08, hold=4), [*[(0.02, 1)] * 30, (0.35, 1), *[(0.02, 1)] * 20])
    assert max(b - a for a, b in pairwise(shown)) <= 0.08 + 1e-9
    _, bare = play(Pace(0.08, hold=1), [*[(0.02, 1)] * 30, (0.35, 1), *[(0.02, 1)] * 20])
    assert max(b - a for a, b in pairwise(bare)) > 0.2


@given(PACES, STEPS)
def test_the_end_alone_shows_what_is_held_and_nothing_else(pace: Pace, steps: list[tuple[float, int]]) -> None:
    pacer, now, made = Pacer(pace), 0.0, 0
    shown: list[float] = []
    for takes_s, count in steps:
        now += takes_s
        made += count
        shown += pacer.show(now, count)
    shown += pacer.show(now + 1.0, 0, end=True)
    assert len(shown) == made
    assert pacer.held == 0
    assert pacer.show(now + 2.0, 0, end=True) == []
