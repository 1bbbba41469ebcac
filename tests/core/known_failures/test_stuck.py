"""Stuck engines, aborts and leaks: nobody waits before an idle machine, and who goes away leaves nothing behind."""

from __future__ import annotations

import random
from sys import getsizeof

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.policies.registry import POLICIES
from paceline.core.policies.slo import Slo
from paceline.core.step import FinishReason
from tests.core.driver import Run, make, spec
from tests.core.known_failures.rig import Sim, ask, conversation, gpu, poisson, start


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    num_blocks=st.integers(2, 24),
    seats=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(["interactive", "standard", "batch"]), min_size=12, max_size=12),
)
def test_whoever_was_accepted_is_served_while_nothing_else_happens(
    policy: str, lengths: list[tuple[int, int]], num_blocks: int, seats: int, kinds: list[str]
) -> None:
    """vllm#45414, #53130, vllm-metal#479: Running 0, Waiting 5, KV 0 %, healthy for nine minutes."""
    run = Run(make(num_blocks, policy=policy, max_num_seqs=seats))
    for number, (prompt, outputs) in enumerate(lengths):
        run.submit(spec(f"r{number}", (number + 1,) * prompt, outputs, stop=(), traffic_class=kinds[number]))
    steps = 0
    while run.scheduler.has_work:
        before = sum(map(len, run.tokens.values())), sum(plan.num_tokens for plan in run.plans)
        assert run.step(), "live requests, and nothing to do"
        after = sum(map(len, run.tokens.values())), sum(plan.num_tokens for plan in run.plans)
        assert after > before or run.scheduler.wake_s is not None, "a step computes something, or waits on purpose"
        steps += 1
        assert steps < 20 * sum(prompt + outputs for prompt, outputs in lengths) + 100, "no livelock"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_blocks_are_free_at_once_when_a_client_goes_away(policy: str, state: str) -> None:
    """vllm#54947, #9428, #24584, #14326: generation goes on after the client has gone, n > 1 in particular."""
    run = Run(make(64, policy=policy, max_num_batched_tokens=8 if state == "prefilling" else 2048))
    choices = [f"r.{choice}" for choice in range(4)]  # the choices of one request are sequences of their own
    for name in choices:
        run.submit(spec(name, (1,) * 40, 30, stop=()))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 4}[state]):
        run.step()
    for name in choices:
        run.cancel(name)
        assert run.finishes[name].reason is FinishReason.ABORT
    stats = run.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert not run.scheduler.has_work
    plans = len(run.plans)
    run.submit(spec("next", (2,) * 40, 2, stop=()))
    run.finish()
    assert all(plan.ids == ("next",) for plan in run.plans[plans:]), "not one more token for who has gone"


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_of_who_has_gone_do_not_pile_up(policy: str) -> None:
    """TensorRT-LLM#8131, #5820, 12313: cancelled ids grew without bound; clean-up ran only when requests came."""
    scheduler = make(64, policy=policy, max_num_seqs=1)
    run = Run(scheduler)
    run.submit(spec("holds the seat", (1,) * 8, 200, stop=()))
    run.step()
    for number in range(3000):
        name = f"r{number}"
        run.submit(
            spec(name, (2,) * 8, 4, tenant=f"t{number}", traffic_class=("standard", "interactive", "batch")[number % 3])
        )
        run.cancel(name)
        run.finishes.clear()
        if number % 500 == 0:
            run.step()
    run.step()
    assert size_of(scheduler) < 600, "containers hold what lives, not what has been"
    run.cancel("holds the seat")


def size_of(root: object) -> int:
    """Entries of all containers that a scheduler reaches, tables of blocks left out."""
    seen: set[int] = set()
    total, stack = 0, [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or getsizeof(thing, 0) == 0:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            total += len(thing)
            stack += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ == "deque":
            items = list(thing)  # type: ignore[call-overload]
            if not all(isinstance(item, int | float | bytes | None.__class__) for item in items):
                total += len(items)
                stack += items
        elif type(thing).__module__.startswith("paceline"):
            slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            stack += [getattr(thing, name) for name in slots if hasattr(thing, name)]
            stack += [*getattr(thing, "__dict__", {}).values()]
    return total


def test_the_line_forgets_who_has_left_it_even_behind_one_who_stays() -> None:
    """Of the same kind: an entry of a heap that is never on top is never dropped."""
    run = Sim(start("slo", gpu, max_num_seqs=1), gpu)
    asks = [ask(0.0, "runs", 10, 3000)]
    asks += [ask(0.01, "stays", 10, 2, kind="batch")]
    asks += [ask(0.02 + 0.001 * n, f"r{n}", 10, 2, kind="batch", leaves_s=0.1 + 0.001 * n) for n in range(5000)]
    run.play(asks, until_s=6.0)
    policy = run.scheduler._policy
    assert isinstance(policy, Slo)
    heaps = policy._line._classes["batch"].aside.heaps
    assert sum(map(len, heaps.values())) < 600


def test_seats_are_not_lost_to_whoever_came_and_went() -> None:
    """vllm#53130: admission stopped for ever when those running and those skipped came to max_num_seqs."""
    rng = random.Random(8)
    asks = poisson(rng, "r", 80.0, (0.0, 20.0), conversation)
    gone = [ask(a.at_s, a.spec.request_id + "x", 300, 50, leaves_s=a.at_s + rng.uniform(0.0, 1.0)) for a in asks]
    run = Sim(start("slo", gpu, max_num_seqs=8, num_blocks=200), gpu).play(asks + gone)
    assert all(life.finish for life in run.lives.values())
    assert run.scheduler.stats().kv_blocks_used == 0
    run.play([ask(run.now, f"after{n}", 50, 4) for n in range(8)])
    assert run.kept("after") == 1.0
