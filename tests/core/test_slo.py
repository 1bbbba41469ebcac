"""The slo policy on a machine with a known law: promises kept, newcomers early, floods contained."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import pytest

from paceline.core.classes import BATCH, Overload, TrafficClass
from paceline.core.policies.parts.backlog import Backlog
from paceline.core.protocols import Estimate
from paceline.core.shape import StepShape
from paceline.core.step import Bound, Rejected, RejectReason, RequestSpec
from paceline.cost.online import OnlineCost
from tests.core.driver import Run, make, spec

CHAT = TrafficClass("chat", ttft_s=2.0, itl_s=0.1)


def machine(shape: StepShape) -> float:
    """30 ms a step, 2 ms a token, and attention that grows with the prompt."""
    return 0.03 + 0.002 * shape.tokens + 1e-7 * shape.context + 1e-7 * shape.pairs


def taught() -> OnlineCost:
    cost = OnlineCost()
    rng = random.Random(0)
    for turn in range(64):
        shape = StepShape()
        for _ in range(rng.randrange(1, 16)):
            shape = shape.plus(rng.randrange(400), 1)
        if turn % 2:
            shape = shape.plus(rng.randrange(500), rng.randrange(2, 400))
        cost.observe(shape, machine(shape))
    return cost


def start(policy: str = "slo", *, kind: TrafficClass = CHAT, num_blocks: int = 2000, **options: object) -> Run:
    scheduler = make(
        num_blocks,
        taught(),
        max_model_len=4096,
        block_size=16,
        policy=policy,
        classes=(kind, BATCH),
        policy_options=tuple(options.items()),
    )
    return Run(scheduler, takes_s=machine)


def chat(name: str, length: int, max_tokens: int, *, tenant: str = "", kind: str = "chat") -> RequestSpec:
    prompt = tuple((hash_free(name) + position) % 997 + 1 for position in range(length))
    return spec(name, prompt, max_tokens, stop=(), traffic_class=kind, tenant=tenant)


def hash_free(name: str) -> int:
    return int.from_bytes(name.encode()) % 997


def gaps(run: Run, names: list[str]) -> list[float]:
    return sorted(b - a for name in names for a, b in zip(run.times[name], run.times[name][1:], strict=False))


@cache
def interference(policy: str = "slo", **options: Any) -> tuple[float, tuple[float, ...]]:
    """Eight steady streams, and a long prompt every 3 s: (p99 gap of the streams, time to each newcomer's first token).

    The same whenever it is played, so that tests share it.
    """
    run = start(policy, **options)
    steady = [f"s{number}" for number in range(8)]
    for name in steady:
        run.submit(chat(name, 32, 400))
    newcomers: list[tuple[str, float]] = []
    while len(newcomers) < 8:
        if run.now >= 1.0 + 3.0 * len(newcomers):
            newcomers.append((f"n{len(newcomers)}", run.now))
            run.submit(chat(newcomers[-1][0], 400, 8))
        assert run.step()
    run.finish()
    found = gaps(run, steady)
    return found[ceil(0.99 * len(found)) - 1], tuple(run.times[name][0] - at for name, at in newcomers)


def test_streams_keep_their_pace_while_long_prompts_arrive() -> None:
    p99, ttfts_s = interference()
    assert p99 <= 0.1, "every gap is inside the promise"
    assert max(ttfts_s) < 2.0, "and so is every newcomer's first token"
    vllm_p99, _ = interference("decode_first")
    assert vllm_p99 > 0.5, "a constant budget of 2,048 lets one prompt stop everybody"


def test_a_static_budget_that_holds_the_pace_is_later_to_the_first_token() -> None:
    _, ttfts_s = interference()
    # 40 is too large to hold the pace, and below 24 all is later still.
    static = [interference("sarathi", chunk=chunk) for chunk in (24, 32, 40)]
    best_s = min(max(others_s) for p99, others_s in static if p99 <= 0.1)
    assert max(ttfts_s) <= best_s, "the budget follows the number of streams; a constant must suit the worst moment"


def test_an_idle_server_prefills_in_large_steps() -> None:
    run = start()
    run.submit(chat("only", 300, 1))
    run.step()
    assert run.plans[-1].counts == (300,)
    assert run.plans[-1].bound_by is Bound.NOTHING


def test_an_idle_step_stays_short_enough_for_who_may_come_next() -> None:
    run = start()
    run.submit(chat("only", 3000, 1))
    run.step()
    assert machine(StepShape().plus(0, run.plans[-1].counts[0])) <= 0.5 * 2.0
    assert run.plans[-1].bound_by is Bound.DEADLINE


def test_the_step_says_what_it_expects_to_take() -> None:
    run = start()
    run.submit(chat("only", 300, 4))
    run.finish()
    for plan in run.plans:
        assert plan.predicted_s is not None
        assert plan.predicted_s > 0.0


def test_first_tokens_come_in_order_of_their_deadlines() -> None:
    run = start()
    run.submit(chat("patient", 1500, 2))
    run.step()
    run.submit(replace(chat("urgent", 100, 2), ttft_s=1.2))
    run.finish()
    assert run.times["urgent"][0] < run.times["patient"][0], "a short one with an early deadline goes between chunks"


def test_a_lost_promise_does_not_cost_the_next_one() -> None:
    run = start()
    for number in range(12):
        run.submit(chat(f"early{number}", 400, 2))  # far more work than 2 s can take
    run.finish()
    kept = sum(times[0] <= 2.0 for times in run.times.values())
    fifo = start("decode_first")
    for number in range(12):
        fifo.submit(chat(f"early{number}", 400, 2))
    fifo.finish()
    assert kept >= 2
    assert kept > sum(times[0] <= 2.0 for times in fifo.times.values())
    assert len(run.finishes) == 12, "nobody admitted is dropped"


def test_late_requests_are_not_starved_by_a_stream_of_punctual_ones() -> None:
    run = start()
    for number in range(6):
        run.submit(chat(f"flood{number}", 900, 2))
    count, waited = 0, 0
    while any(f"flood{number}" not in run.finishes for number in range(6)):
        run.submit(chat(f"p{count}", 150, 2))
        count += 1
        for _ in range(3):
            run.step()
        waited += 1
        assert waited < 400, "late requests age out of waiting"


def test_a_flooding_tenant_delays_itself() -> None:
    run = start()
    for number in range(30):
        run.submit(chat(f"flood{number}", 400, 4, tenant="a"))
    for _ in range(4):
        run.step()
    asked = run.now
    run.submit(chat("other", 100, 4, tenant="b"))
    run.finish()
    assert run.times["other"][0] - asked < 1.5
    assert sum(times[0] > run.times["other"][0] for times in run.times.values()) > 20


def test_batch_soaks_up_what_is_left() -> None:
    run = start()
    for number in range(4):
        run.submit(chat(f"bulk{number}", 800, 20, kind="batch"))
    run.step()
    asked = run.now
    run.submit(chat("person", 100, 30))
    run.finish()
    assert run.times["person"][0] - asked < 2.0
    assert gaps(run, ["person"])[-1] <= 0.1
    assert len(run.finishes) == 5


def test_a_class_can_refuse_what_it_cannot_keep() -> None:
    kind = TrafficClass("chat", ttft_s=2.0, itl_s=0.1, overload=Overload.REJECT)
    run = start(kind=kind)
    answers = []
    for number in range(10):
        answers.append(run.scheduler.submit(chat(f"r{number}", 500, 2), run.now))
        run.step()
    refused = [answer for answer in answers if isinstance(answer, Rejected)]
    assert refused, "ten prompts of a second each cannot all start within two"
    assert all(answer.reason is RejectReason.OVERLOADED for answer in refused)
    assert all(answer.retry_after_s is not None and answer.retry_after_s > 0 for answer in refused)
    run.finish()
    assert all(times[0] <= 2.0 + run.finishes[name].arrived_s + 0.2 for name, times in run.times.items())


def test_when_decoding_alone_is_too_slow_newcomers_are_not_starved() -> None:
    run = start(kind=TrafficClass("chat", ttft_s=2.0, itl_s=0.02))  # a step alone takes 30 ms
    for number in range(4):
        run.submit(chat(f"s{number}", 20, 60))
    for _ in range(3):
        run.step()
    asked = run.now
    run.submit(chat("new", 200, 2))
    run.finish()
    assert run.times["new"][0] - asked < 2.0


def test_the_victim_has_the_most_slack_for_what_it_loses() -> None:
    run = start(num_blocks=40)
    run.submit(chat("person", 160, 200))
    run.submit(chat("bulk", 160, 200, kind="batch"))
    run.finish()
    assert run.finishes["person"].preemptions == 0
    assert run.finishes["bulk"].preemptions > 0


def test_pace_by_timeline_lets_early_tokens_build_slack() -> None:
    by_gap, by_timeline = start(pace="gap"), start(pace="timeline")
    ttft = []
    for run in (by_gap, by_timeline):
        run.submit(chat("stream", 20, 60))
        for _ in range(20):
            run.step()
        asked = run.now
        run.submit(chat("new", 400, 2))
        run.finish()
        ttft.append(run.times["new"][0] - asked)
        first = run.times["stream"][0]
        if run is by_timeline:
            assert all(at <= first + 0.1 * turn + 1e-6 for turn, at in enumerate(run.times["stream"]))
    assert ttft[1] < ttft[0]


def test_tokens_held_back_bridge_a_prompt() -> None:
    """The same streams and newcomers: no reader waits longer than promised either way, and newcomers wait far less."""
    even_p99, even_s = interference()
    gap_p99, gap_s = interference(pace="gap")
    assert max(even_p99, gap_p99) <= 0.1
    assert max(even_s[1:]) < max(gap_s[1:]) / 1.3, "at the first one the streams are too young to hold any"
    for run in (start(), start(pace="gap")):
        for number in range(8):
            run.submit(chat(f"s{number}", 32, 100))
        run.finish()
        assert run.now == pytest.approx(98 * machine(StepShape(8, 8)), rel=0.2), "and no answer takes longer for it"


def test_who_may_not_be_held_back_is_shown_each_token_as_it_comes() -> None:
    run = start()
    run.submit(replace(chat("stop-string", 20, 30), even=False))
    run.finish()
    ended = [run.finishes["stop-string"].finished_s]
    assert run.times["stop-string"][-2:] == [pytest.approx(ended[0] - machine(StepShape(1, 1, 48))), *ended]


def test_without_a_cost_model_it_still_serves() -> None:
    run = Run(make(policy="slo"), takes_s=machine)
    for number in range(5):
        run.submit(spec(f"r{number}", (number + 1,) * 30, 5, stop=()))
    run.finish()
    assert len(run.finishes) == 5


@pytest.mark.parametrize("seed", range(3))
def test_the_online_model_suffices_from_a_cold_start(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(2000, OnlineCost(), max_model_len=4096, block_size=16, policy="slo", classes=(CHAT, BATCH))
    run = Run(scheduler, takes_s=lambda shape: machine(shape) * rng.lognormvariate(0.0, 0.03))
    for number in range(6):
        run.submit(chat(f"warm{number}", rng.randrange(10, 300), 12))
        for _ in range(4):
            run.step()
    run.finish()
    steady = [f"s{number}" for number in range(6)]
    for name in steady:
        run.submit(chat(name, 32, 150))
    for number in range(4):
        for _ in range(20):
            run.step()
        run.submit(chat(f"n{number}", 500, 4))
    run.finish()
    found = gaps(run, steady)
    assert found[ceil(0.95 * len(found)) - 1] <= 0.1


class Surprised(OnlineCost):
    """Knows what steps take, and believes that one in twenty with a prompt takes ten times as long."""

    def predict(self, shape: StepShape) -> Estimate:
        seconds = machine(shape)
        return Estimate(seconds, seconds, 10.0 * seconds if shape.pairs else seconds)


def test_a_model_that_was_surprised_does_not_keep_prompts_out() -> None:
    """Whoever sees no prompt any more cannot learn that they have become harmless again."""
    scheduler = make(
        2000, Surprised(), max_model_len=4096, block_size=16, policy="slo", classes=(CHAT, BATCH), prefix_caching=False
    )
    assert isinstance(scheduler.cost, OnlineCost)
    for _ in range(10):
        scheduler.cost.observe(StepShape(1, 1, 10, 0), 0.032)
    run = Run(scheduler, takes_s=machine)
    for number in range(4):
        run.submit(chat(f"s{number}", 20, 150))
    for _ in range(10):
        run.step()
    asked = run.now
    run.submit(chat("new", 300, 2))
    run.finish()
    # In small parts, since caution makes steps small: not one part in `patience` steps, which would take 20 s.
    assert run.times["new"][0] - asked < 5.0
    assert max(gaps(run, [f"s{number}" for number in range(4)])) <= 0.1


def test_a_step_with_room_left_says_nothing_against_a_higher_rate() -> None:
    """A short prompt fills no step: taken for the machine's rate, it made long ones look hopeless."""
    backlog = Backlog()
    for _ in range(50):
        backlog.saw(400, 1.0, Bound.DEADLINE)
    for _ in range(50):
        backlog.saw(3, 0.05, Bound.NOTHING)
    assert backlog._tokens_per_s == pytest.approx(400.0, rel=0.01)
    for _ in range(50):
        backlog.saw(10, 0.1, Bound.DEADLINE)
    assert backlog._tokens_per_s < 105.0, "a full one does"
