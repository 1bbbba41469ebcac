"""The one loop shows every token when the pacer would."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pace import Pace, Pacer
from paceline.simulate.paced import paced


@given(
    st.lists(st.floats(0.0, 0.3), max_size=60),
    st.floats(0.0, 1.0),
    st.builds(Pace, st.floats(0.005, 0.2), st.integers(0, 8)),
)
def test_it_is_the_pacer_all_at_once(gaps: list[float], after_s: float, pace: Pace) -> None:
    made = list(itertools.accumulate(gaps))
    end_s = (made[-1] if made else 0.0) + after_s
    pacer = Pacer(pace)
    expected: list[float] = []
    for now in made:
        expected += pacer.show(now, 1)
    expected += pacer.show(end_s, 0, end=True)[: len(made) - len(expected)]  # nothing held, nothing shown
    assert paced(made, end_s, pace) == pytest.approx(expected)


def test_without_a_pause_tokens_run_behind_by_what_is_held() -> None:
    made = [0.01 * number for number in range(10)]
    shown = paced(made, 0.09, Pace(interval_s=0.05, hold=3))
    assert shown[0] == 0.0
    assert shown[1:7] == tuple(made[4:])
    assert shown[7:] == (0.09, 0.09, 0.09)
