"""One simulated engine, step by step."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.step import FinishReason, RejectReason, RequestSpec
from paceline.simulate.backend import OUTPUT, STOP
from paceline.simulate.replica import Replica, Turn
from tests.simulate.laws import Linear


def spec(name: str, prompt: int = 10, most: int = 4, **fields: object) -> RequestSpec:
    sampling = SamplingParams(max_tokens=most, stop_token_ids=(STOP,))
    return RequestSpec(name, (sum(map(ord, name)),) * prompt, sampling, **fields)  # type: ignore[arg-type]


def config(**fields: object) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 64, "max_model_len": 512, **fields})  # type: ignore[arg-type]


def drain(replica: Replica) -> list[Turn]:
    turns = []
    while (at_s := replica.next_s) < math.inf:
        turns.append(replica.turn(at_s))
    return turns


def test_steps_take_what_the_law_says() -> None:
    replica = Replica("a", config(), Linear(0.010, 0.001, 0.0), debug=True)
    replica.deliver(spec("r", prompt=10, most=3), at_s=2.0)
    turns = drain(replica)
    assert [turn.at_s for turn in turns] == pytest.approx([2.0, 2.020, 2.031, 2.042])
    assert turns[0].events is None
    (finish,) = turns[-1].finished
    assert (finish.reason, finish.output_tokens) == (FinishReason.LENGTH, 3)
    assert finish.first_token_s == pytest.approx(2.020)
    assert replica.idle
    assert replica.clock.now() == turns[-1].at_s


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    replica = Replica("a", config(), Linear(0.010, 0.0, 0.0))
    replica.deliver(spec("first"), at_s=0.0)
    replica.turn(0.0)
    replica.deliver(spec("second", sent_s=0.004), at_s=0.005)
    assert replica.next_s == pytest.approx(0.010)
    assert len(replica.inbox) == 1
    turn = replica.turn(replica.next_s)
    assert turn.events is not None
    assert turn.events.ids == ("first",)
    turn = replica.turn(replica.next_s)
    assert turn.events is not None
    assert set(turn.events.ids) == {"first", "second"}
    finishes = {finish.request_id: finish for turn in drain(replica) for finish in turn.finished}
    assert finishes["second"].arrived_s == 0.004


def test_an_answer_ends_before_max_tokens() -> None:
    replica = Replica("a", config(), Linear())
    answer = (OUTPUT, 77, STOP)
    replica.deliver(spec("r", most=100), 0.0, answer)
    replica.deliver(spec("other", most=5), 0.0)
    turns = drain(replica)
    tokens = [
        token
        for turn in turns
        if turn.events is not None
        for name, new in zip(turn.events.ids, turn.events.tokens, strict=True)
        if name == "r"
        for token in new
    ]
    assert tuple(tokens) == answer
    finishes = {finish.request_id: finish for turn in turns for finish in turn.finished}
    assert finishes["r"].reason is FinishReason.STOP
    assert (finishes["other"].reason, finishes["other"].output_tokens) == (FinishReason.LENGTH, 5)


def test_an_answer_survives_preemption() -> None:
    """Memory for neither: they are evicted in turn, and both answers come out whole."""
    replica = Replica("a", config(num_blocks=8, prefix_caching=False), Linear(), debug=True)
    answer = (*range(50, 99), STOP)
    for name in ("a", "b", "c"):
        replica.deliver(spec(name, prompt=20, most=100), 0.0, answer)
    turns = drain(replica)
    said: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for turn in turns:
        if turn.events is not None:
            for name, new in zip(turn.events.ids, turn.events.tokens, strict=True):
                said[name] += new
    assert replica.scheduler.stats().preemptions > 0
    assert all(tuple(tokens) == answer for tokens in said.values())


def test_rejections_and_cancellations_come_with_the_next_turn() -> None:
    replica = Replica("a", config(), Linear())
    replica.deliver(spec("long", prompt=600), 0.0)
    replica.deliver(spec("r"), 0.0)
    turn = replica.turn(0.0)
    assert [answer.reason for answer in turn.rejected] == [RejectReason.TOO_LONG]
    replica.cancel("r", 0.001)
    replica.cancel("nobody", 0.001)
    turn = replica.turn(replica.next_s)
    assert [(finish.request_id, finish.reason) for finish in turn.finished] == [("r", FinishReason.ABORT)]
    assert replica.next_s == math.inf
    assert replica.idle
    replica.scheduler.check_integrity()


def test_a_dead_engine_ends_everybody_once() -> None:
    replica = Replica("a", config(), Linear())
    replica.deliver(spec("one", most=1), 0.0)  # would end with the step that is lost
    replica.deliver(spec("two"), 0.0)
    replica.turn(0.0)
    replica.deliver(spec("three"), 0.001)
    finished = replica.abandon()
    assert sorted(finish.request_id for finish in finished) == ["one", "two"]
    assert {finish.reason for finish in finished} == {FinishReason.ERROR}
    assert replica.next_s == math.inf
    replica.scheduler.check_integrity()


def test_jitter_is_drawn_from_the_estimate_and_reproducible() -> None:
    def ends(seed: int) -> list[float]:
        replica = Replica("a", config(), Linear(0.01, 0.0, 0.0, spread=0.2), jitter=random.Random(seed))
        replica.deliver(spec("r", most=400), 0.0)
        return [turn.at_s for turn in drain(replica)]

    one = ends(1)
    assert one == ends(1)
    assert one != ends(2)
    steps = sorted(b - a for a, b in itertools.pairwise(one))
    assert steps[len(steps) // 2] == pytest.approx(0.01, rel=0.03)
    outside = sum(not 0.008 <= step <= 0.012 for step in steps)
    assert 0.04 < outside / len(steps) < 0.18, "nine in ten lie within the range"


def test_usage_adds_up() -> None:
    replica = Replica("a", config(), Linear())
    for number in range(5):
        replica.deliver(spec(f"r{number}", prompt=100, most=20), 0.0)
    last = drain(replica)[-1].at_s
    report = replica.usage.report(2 * last)
    assert report.busy_s == pytest.approx(last)
    assert report.utilisation == pytest.approx(0.5)
    assert report.tokens == 5 * (100 + 19)
    assert report.prefill_tokens == 500
    assert sum(report.bound_share.values()) == pytest.approx(1.0)
    assert report.kv_used_max is not None
    assert 0.0 < report.kv_used_max <= 1.0
