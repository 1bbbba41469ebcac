"""Drafts and their acceptance: tokens a step, what it costs, and where it stops to pay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.simulate.fleet.speculation import Speculation
from tests.simulate.fleets import config, pools, request, run, whole
from tests.simulate.laws import Linear

LAW = Linear(0.010, 1e-4, 0.0)


def test_expected_tokens_are_a_sum_of_products() -> None:
    drafting = Speculation((0.8, 0.5, 0.25))
    assert drafting.tokens_per_step == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.25)
    rng = random.Random(5)
    drawn = [drafting.draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(drafting.tokens_per_step - 1, rel=0.02)


def test_when_everything_is_accepted_a_stream_is_as_many_times_faster() -> None:
    plain = run([("a", whole(cost=LAW))], [request(0, output=101)]).done[0]
    fast = run([("a", whole(cost=LAW, speculation=Speculation((1.0, 1.0, 1.0))))], [request(0, output=101)]).done[0]
    assert fast.token_counts == [1] + [4] * 25
    assert plain.tpot_s == pytest.approx(0.0101)
    assert fast.tpot_s == pytest.approx(0.0104 / 4)  # a step of four tokens brings four


def test_nothing_accepted_costs_the_verification_and_the_draft() -> None:
    drafting = Speculation((0.0, 0.0), draft_share=0.1)
    slow = run([("a", whole(cost=LAW, speculation=drafting))], [request(0, output=11)]).done[0]
    assert slow.token_counts == [1] * 11
    assert slow.tpot_s == pytest.approx(0.0103 * 1.2)


def test_a_draft_model_of_its_own_is_asked_for_each_pass() -> None:
    drafting = Speculation((0.0, 0.0), draft=Linear(0.001, 1e-5, 0.0))
    slow = run([("a", whole(cost=LAW, speculation=drafting))], [request(0, output=3)]).done[0]
    assert slow.tpot_s == pytest.approx(0.0103 + 2 * 0.00101)


def test_the_gain_shrinks_with_the_batch() -> None:
    drafting = Speculation((0.7, 0.6, 0.5))
    large = config(num_blocks=4096, max_model_len=512)
    gains = []
    for batch in (1, 16, 128):
        arrivals = [request(i, prompt=8, output=60) for i in range(batch)]
        plain, fast = (
            run([("a", whole(cost=LAW, config=large, speculation=s))], arrivals).end_s for s in (None, drafting)
        )
        gains.append(plain / fast)
    assert gains[0] > 1.7
    assert gains[0] > gains[1] > gains[2]
    assert gains[2] < 1.0  # 128 rows of four tokens cost more than the 2.4 tokens they bring are worth


@settings(max_examples=25, deadline=None)
@given(
    acceptance=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5).map(tuple),
    requests=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12),
    blocks=st.integers(20, 60),
    pooled=st.booleans(),
    policy=st.sampled_from(["decode_first", "sarathi", "no_evict", "max_utilization", "orca", "static_batch"]),
)
def test_every_request_gets_its_tokens_whatever_is_accepted_and_preempted(
    acceptance: tuple[float, ...], requests: list[tuple[int, int]], blocks: int, pooled: bool, policy: str
) -> None:
    blueprint = {
        "cost": LAW,
        "config": config(num_blocks=blocks, policy=policy),
        "speculation": Speculation(acceptance),
    }
    members = pools(1, 1, **blueprint) if pooled else [("a", whole(**blueprint))]
    arrivals = [request(i, 0.01 * i, prompt, output) for i, (prompt, output) in enumerate(requests)]
    run(members, arrivals)


@pytest.mark.parametrize(
    "bad", [{"acceptance": ()}, {"acceptance": (1.2,)}, {"acceptance": (0.5,), "draft_share": -1.0}]
)
def test_speculation_that_cannot_be(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Speculation(**bad)  # type: ignore[arg-type]


def test_a_policy_that_takes_drafts_for_prompts_is_refused() -> None:
    for name in ("prefill_first", "sglang"):
        with pytest.raises(ConfigError, match="choose another"):
            whole(config=config(policy=name), speculation=Speculation((0.5,)))
