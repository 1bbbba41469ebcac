"""Overload: nobody waits without end, no tenant is pushed below its share, and refusals foretell the wait."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import pytest

from paceline.core.classes import BATCH, Overload, TrafficClass
from paceline.core.step import Rejected, RejectReason
from tests.core.known_failures.rig import CHAT, Life, Sim, ask, conversation, poisson, start

LASTS_S = 600.0


def prompts(rng: random.Random) -> tuple[int, int]:
    """Half a second of work on average, nearly all of it the prompt."""
    return rng.randrange(50, 600), 4


@cache
def long_overload(late_share: float = 0.1) -> Sim:
    """Ten minutes of more than twice what the machine can do, and to the end of all who came."""
    asks = poisson(random.Random(7), "r", 3.0, (0.0, LASTS_S), prompts)
    return Sim(start("slo", late_share=late_share), check_every=1009).play(asks)


def begun_s(life: Life) -> float:
    assert life.finish is not None
    assert life.finish.scheduled_s is not None
    return life.finish.scheduled_s


def test_the_overload_is_more_than_twice_what_the_machine_can_do() -> None:
    asked = sum(len(life.ask.spec.prompt) for life in long_overload().of("r"))
    served = sum(len(life.ask.spec.prompt) for life in long_overload().of("r") if life.times[0] <= LASTS_S)
    assert asked > 2.0 * served


def test_who_is_late_waits_for_those_who_were_late_before_it_and_no_longer() -> None:
    """The bound of docs/policies/slo.md: older prompts aside, at half of `late_share` of all prefill; then at all."""
    run = long_overload()
    assert all(life.finish and life.times for life in run.lives.values())
    served = sum(len(life.ask.spec.prompt) for life in run.of("r") if life.times[0] <= LASTS_S)
    rate = served / LASTS_S  # prompt tokens a second
    ahead = 0
    late = [life for life in run.of("r") if life.first_late]
    assert len(late) > 900
    for life in late:
        ahead += len(life.ask.spec.prompt)
        during_s = ahead / (0.5 * 0.1 * rate)
        after_s = LASTS_S - life.ask.at_s + ahead / rate
        assert life.ttft_s <= 10.0 + min(during_s, after_s), life.ask


def test_those_who_begin_late_begin_in_the_order_in_which_they_came() -> None:
    late = [life for life in long_overload().of("r") if begun_s(life) > life.ask.at_s + 2.0]
    assert sum(begun_s(life) < LASTS_S for life in late) > 50, "many of them while the overload lasts"
    begun = [begun_s(life) for life in late]
    assert begun == sorted(begun)


def test_turns_of_the_late_cost_the_promises_of_others_no_more_than_their_share() -> None:
    kept = sum(life.kept for life in long_overload().of("r"))
    most = sum(life.kept for life in long_overload(late_share=0.01).of("r"))
    assert kept > 0.85 * most


@pytest.mark.parametrize(("length", "within_s"), [(300, 2.0), (720, 5.0), (1500, 9.0)])
def test_a_quiet_tenant_has_half_of_the_machine_beside_a_flood(length: int, within_s: float) -> None:
    """Alone these take 0.7, 1.6 and 3.4 s: too long for the promise beside a flood, and yet half of all is theirs."""
    flood = poisson(random.Random(0), "f", 4.0, (0.0, 60.0), conversation, tenant="flood")
    run = Sim(start("slo")).play([ask(20.0, "quiet", length, 20, tenant="quiet"), *flood], until_s=60.0)
    assert run.lives["quiet"].ttft_s < within_s


@pytest.mark.parametrize("before_s", [0.0, 60.0])
def test_a_flood_that_begins_has_no_right_of_way_before_who_was_there(before_s: float) -> None:
    """A tenant that comes back goes first with a few prompts; whoever comes with many takes turns from the first."""
    kind = replace(CHAT, ttft_s=6.0)
    rng = random.Random(5)
    alone = poisson(rng, "before", 1.0, (0.0, before_s), lambda rng: (150, 4), tenant="quiet")
    flood = [ask(before_s + 0.004 * n, f"f{n}", 150, 20, tenant="flood") for n in range(32)]
    quiet = poisson(rng, "quiet", 1.0, (before_s + 1.0, before_s + 9.0), lambda rng: (60, 4), tenant="quiet")
    run = Sim(start("slo", classes=(kind, BATCH), caching=False)).play([*alone, *flood, *quiet])
    assert run.ttft_s("f") > 9.0, "a flood"
    assert run.ttft_s("quiet") < 1.0


@pytest.mark.parametrize("lack", ["seats", "memory", "memory of its own class"])
def test_who_needs_much_room_finds_it_beside_a_flood_of_those_who_need_little(lack: str) -> None:
    one, limits = {
        "seats": (ask(10.0, "one", 200, 20, kind="batch"), {"max_num_seqs": 4}),
        "memory": (ask(10.0, "one", 400, 20, kind="batch"), {"num_blocks": 50}),
        "memory of its own class": (ask(10.0, "one", 700, 20), {"num_blocks": 60}),
    }[lack]
    flood = poisson(random.Random(0), "f", 4.0, (0.0, 180.0), lambda rng: (60, 40))
    run = Sim(start("slo", **limits)).play([one, *flood], until_s=180.0)  # type: ignore[arg-type]
    assert run.lives["one"].finish is not None


STRICT = replace(CHAT, overload=Overload.REJECT)


@dataclass(frozen=True)
class Load:
    """Two minutes of equal requests, and what there is too little of for them."""

    rate: float
    prompt: int = 20
    outputs: tuple[int, int] = (100, 101)
    max_num_seqs: int = 256
    num_blocks: int = 4000

    def play(self, kind: TrafficClass) -> Sim:
        asks = poisson(
            random.Random(1),
            "r",
            self.rate,
            (0.0, 120.0),
            lambda rng: (self.prompt, rng.randrange(*self.outputs)),
            max_tokens=2 * self.outputs[1],
        )
        scheduler = start(
            "slo", classes=(kind, BATCH), max_num_seqs=self.max_num_seqs, num_blocks=self.num_blocks, caching=False
        )
        return Sim(scheduler, check_every=1009).play(asks)


LOADS = {
    "time for prompts": Load(3.0, prompt=400, outputs=(2, 3)),
    "seats": Load(3.0, max_num_seqs=4),
    "seats, answers of any length": Load(3.0, outputs=(10, 200), max_num_seqs=4),
    "memory": Load(6.0, num_blocks=60),
    "pace": Load(8.0),
}


@pytest.mark.parametrize("lack", LOADS)
def test_a_class_that_refuses_foretells_the_wait_whatever_there_is_too_little_of(lack: str) -> None:
    """Who is taken is in time, and who was refused would not have been: no more are kept when all are taken."""
    load = LOADS[lack]
    run, all_taken = load.play(STRICT), load.play(CHAT)
    assert len(run.refused) > 100
    taken = run.of("r")
    assert sum(life.first_late for life in taken) <= 0.05 * len(taken), "the percentile of the class"
    assert sum(life.kept for life in taken) >= sum(life.kept for life in all_taken.of("r"))
    assert sum(all_taken.lives[name].first_late for name in run.refused) > 0.5 * len(run.refused)


def test_nobody_is_refused_while_there_is_enough_of_all() -> None:
    run = Load(0.8, prompt=100, outputs=(20, 60)).play(STRICT)
    assert len(run.refused) <= 0.02 * len(run.lives)


@pytest.mark.parametrize("lack", ["seats", "memory"])
def test_who_was_refused_is_told_when_it_would_have_been_taken(lack: str) -> None:
    limits = {"max_num_seqs": 4} if lack == "seats" else {"num_blocks": 40}
    run = Sim(start("slo", classes=(STRICT, BATCH), caching=False, **limits))  # type: ignore[arg-type]
    run.play([ask(0.0, f"early{n}", 20, 100) for n in range(4)])  # what answers are like
    run.play([ask(run.now + 0.1 * n, f"r{n}", 20, 100) for n in range(8)], until_s=run.now + 1.0)
    refused = run.scheduler.submit(ask(run.now, "late", 20, 100).spec, run.now)
    assert isinstance(refused, Rejected)
    assert refused.retry_after_s is not None
    soon = run.scheduler.submit(ask(run.now, "soon", 20, 100).spec, run.now + 0.2 * refused.retry_after_s)
    assert isinstance(soon, Rejected)
    run.play([ask(run.now + refused.retry_after_s + 0.1, "again", 20, 100)])
    assert run.kept("again") == 1.0


@pytest.mark.parametrize("whose", ["class", "server"])
def test_who_finds_a_queue_full_is_told_when_there_is_room_in_it(whose: str) -> None:
    kind = replace(CHAT, queue_limit=2 if whose == "class" else None)
    run = Sim(start("slo", classes=(kind, BATCH), max_num_seqs=2, max_waiting=2 if whose == "server" else None))
    run.play([ask(0.0, f"early{n}", 20, 300) for n in range(2)])
    began_s = run.now
    run.play([ask(began_s + 0.5 * n, f"r{n}", 20, 300) for n in range(6)], until_s=began_s + 3.0)
    refused = run.refused["r5"]
    assert refused.reason is RejectReason.QUEUE_FULL
    run.play([])
    found_s = run.lives["r2"].times[0] - (began_s + 2.5)  # when the first of those who wait has left the queue
    assert found_s > 5.0
    assert refused.retry_after_s == pytest.approx(found_s, rel=0.5)


@pytest.mark.parametrize("rate", [1.5, 2.0])
def test_a_time_to_the_last_token_leaves_the_answer_its_time_after_the_first(rate: float) -> None:
    """A first token that comes just before the last one is due keeps nothing; and answers are shorter than allowed."""
    kind = TrafficClass("whole", e2e_s=8.0)
    asks = poisson(random.Random(3), "r", rate, (0.0, 90.0), conversation, kind="whole", max_tokens=300)
    kept = {
        policy: sum(
            life.times[-1] - life.ask.at_s <= 8.0 for life in Sim(start(policy, classes=(kind,))).play(asks).of("r")
        )
        for policy in ("slo", "decode_first")
    }
    assert kept["slo"] > kept["decode_first"], kept
