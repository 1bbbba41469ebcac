"""Promises that nobody can keep, or that mean nothing: a client may ask for any, and the engine must outlive them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.classes import Overload, TrafficClass
from paceline.core.pace import Pace, Pacer
from tests.core.driver import Run, make, spec

TIMES = st.sampled_from([None, 0.0, 5e-324, 1e-310, 1e-12, 0.05, 3.0, 1e9, 1e300])  # seconds
WANTS = st.tuples(TIMES, TIMES, TIMES, st.integers(1, 60), st.integers(1, 12))


@pytest.mark.parametrize("pace", ["even", "gap", "timeline"])
@settings(max_examples=60)
@given(st.lists(WANTS, min_size=1, max_size=8), st.sampled_from(Overload))
def test_any_promise_is_served_or_refused(
    pace: str, wants: list[tuple[float | None, float | None, float | None, int, int]], overload: Overload
) -> None:
    scheduler = make(
        num_blocks=24,
        policy="slo",
        policy_options=(("pace", pace),),
        classes=(TrafficClass("chat", ttft_s=2.0, itl_s=0.1, overload=overload),),
    )
    run = Run(scheduler, takes_s=lambda shape: 0.01 + 0.001 * shape.tokens)
    taken = {}
    for number, (ttft_s, itl_s, e2e_s, length, max_tokens) in enumerate(wants):
        request = spec(f"r{number}", (1 + number,) * length, max_tokens, stop=(), traffic_class="chat")
        request = replace(request, ttft_s=ttft_s, itl_s=itl_s, e2e_s=e2e_s)
        if run.submit(request):
            taken[request.request_id] = max_tokens
        run.step()
    for _ in range(2000):
        if len(run.finishes) == len(taken):
            break
        run.step()
    assert {name: len(run.tokens[name]) for name in taken} == taken
    assert {name: len(run.times[name]) for name in taken} == taken


@given(
    st.sampled_from([0.0, 5e-324, 1e-310, 1e-12, 0.1, 1e9, 1e300]),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from([0.0, 1e-9, 0.1, 1e6]), st.integers(0, 4)), max_size=40),
)
def test_no_gap_however_odd_loses_a_token(interval_s: float, hold: int, steps: list[tuple[float, int]]) -> None:
    """A step that brings none shows no more than time does."""
    pacer, now, made, shown = Pacer(Pace(interval_s, hold)), 0.0, 0, 0
    for takes_s, count in steps:
        now += takes_s
        made += count
        shown += pacer.add(now, count)
        assert 0 <= pacer.held <= hold
        assert shown + pacer.held == made
        assert pacer.shown_s is None or pacer.shown_s <= now
