"""Priority order of the presets, as servers and simulations ask for it: by the class of a request."""

from __future__ import annotations

import pytest

from paceline.core.classes import TrafficClass
from tests.core.known_failures.rig import Sim, ask, start

FIRST = TrafficClass("first", priority=0, ttft_s=1.0, itl_s=0.1)
SECOND = TrafficClass("second", priority=5, ttft_s=5.0, itl_s=0.25)
CLASSES = (FIRST, SECOND)


@pytest.mark.parametrize("policy", ["decode_first", "prefill_first"])
def test_a_class_of_higher_priority_goes_before_those_who_wait(policy: str) -> None:
    asks = [ask(0.001 * n, f"s{n}", 200, 100, kind="second") for n in range(20)] + [ask(1.0, "f", 50, 10, kind="first")]
    waits = {
        order: Sim(start(policy, classes=CLASSES, max_num_seqs=4, order=order)).play(asks).ttft_s("f")
        for order in ("fcfs", "priority")
    }
    assert waits["priority"] < 0.35 * waits["fcfs"], "as soon as a seat is free"


def test_a_class_of_lower_priority_gives_way_first() -> None:
    asks = [ask(0.0, "s", 150, 200, kind="second"), ask(0.5, "f", 150, 200, kind="first")]
    run = Sim(start("decode_first", classes=CLASSES, num_blocks=30, caching=False, order="priority")).play(asks)
    assert run.lives["f"].finish is not None
    assert run.lives["s"].finish is not None
    assert run.lives["f"].finish.preemptions == 0
    assert run.lives["s"].finish.preemptions > 0


def test_within_a_class_a_request_s_own_priority_counts() -> None:
    asks = [ask(0.001 * n, f"s{n}", 200, 100, kind="second", priority=3) for n in range(8)]
    asks += [ask(0.5, "urgent", 200, 10, kind="second", priority=1), ask(0.6, "f", 200, 10, kind="first", priority=9)]
    run = Sim(start("decode_first", classes=CLASSES, max_num_seqs=1, order="priority")).play(asks)
    order = sorted(run.lives, key=lambda name: run.lives[name].times[0])
    assert order[1:3] == ["f", "urgent"]
