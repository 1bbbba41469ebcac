"""Memory, preemption and admission: who is let in, who gives way, what that costs, and how a full house says no."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.classes import BATCH, Overload, TrafficClass
from paceline.core.policies.parts.promises import slack_per_token
from paceline.core.request import Request
from paceline.core.step import Rejected, RejectReason, StepPlan
from tests.core.driver import VOCAB, Run, make, spec
from tests.core.known_failures.rig import CHAT, Ask, Sim, ask, cpu, gpu, start
from tests.core.memory_backend import expected_output

OPTIMISTIC = ["decode_first", "max_utilization", "prefill_first", "sarathi", "slo"]  # those that may have to evict


def crowd(count: int = 200, *, kind: str = "batch", max_tokens: int | None = None) -> list[Ask]:
    """Many at once, of mixed lengths; together they need several times the memory."""
    rng = random.Random(1)
    lengths = [(rng.randrange(50, 300), rng.randrange(50, 300)) for _ in range(count)]
    return [ask(0.001 * n, f"r{n}", p, o, kind=kind, max_tokens=max_tokens) for n, (p, o) in enumerate(lengths)]


def preemptions(run: Sim) -> list[int]:
    return [life.finish.preemptions for life in run.lives.values() if life.finish]


@pytest.mark.parametrize("kind", ["batch", "chat"])
def test_little_is_computed_twice_when_memory_runs_out(kind: str) -> None:
    """vllm#54644: the recompute tax is 32 to 79 %; who is evicted makes half of it."""
    runs = {name: Sim(start(name, gpu, num_blocks=300), gpu).play(crowd(kind=kind)) for name in ("slo", "decode_first")}
    tax = {name: run.scheduler.stats().recomputed_tokens / run.tokens for name, run in runs.items()}
    assert tax["slo"] < 0.6 * tax["decode_first"], tax
    assert max(preemptions(runs["slo"])) <= 2 < max(preemptions(runs["decode_first"]))


def test_the_victim_is_who_loses_least_for_the_slack_it_has() -> None:
    """vllm#54644: last in, first out evicts whoever came last, however much it has computed."""
    run = Sim(start("slo", num_blocks=70, caching=False))
    run.play(
        [
            ask(0.0, "short", 60, 300, kind="batch"),
            ask(0.5, "chat", 60, 300),
            ask(1.0, "long", 600, 300, kind="batch"),
        ]
    )
    evicted = {name: life.finish.preemptions for name, life in run.lives.items() if life.finish}
    assert evicted["chat"] == 0
    assert evicted["short"] > evicted["long"]


def test_what_was_computed_twice_is_counted_for_each_and_for_all() -> None:
    """vllm#18115, #42827: generation collapses when memory is short and nobody can see why."""
    run = Sim(start("slo", gpu, num_blocks=300), gpu).play(crowd())
    finishes = [life.finish for life in run.lives.values() if life.finish]
    stats = run.scheduler.stats()
    assert stats.preemptions == sum(finish.preemptions for finish in finishes) > 0
    assert stats.recomputed_tokens == sum(finish.recomputed_tokens for finish in finishes) > 0
    useful = sum(len(life.ask.spec.prompt) + life.ask.outputs - 1 for life in run.lives.values())
    assert run.tokens == useful + stats.recomputed_tokens, "nothing else was computed in vain"


@pytest.mark.parametrize("policy", ["decode_first", "slo"])
def test_prompts_are_let_in_whole_and_do_not_crowd_each_other_out_half_way(policy: str) -> None:
    """vllm#37307: admission by the first chunk alone lets in more prompts than fit, and they evict each other."""
    asks = [ask(0.0, f"r{n}", 900, 4, kind="batch") for n in range(12)]
    run = Sim(start(policy, num_blocks=130, budget=128, caching=False)).play(asks)
    assert run.scheduler.stats().recomputed_tokens == 0
    loose = Sim(
        start("decode_first", num_blocks=130, budget=128, caching=False, long_prefill_threshold=32, reserve_whole=False)
    )
    assert loose.play(asks).scheduler.stats().recomputed_tokens > 1000


def test_one_huge_max_tokens_does_not_block_everybody() -> None:
    """TensorRT-LLM#2866: reserving the worst case, one request that asks for 30,000 tokens has the engine to itself."""
    asks = [
        ask(0.0, "greedy", 50, 40, max_tokens=7000),
        *(ask(0.1, f"r{n}", 50, 20, max_tokens=2000) for n in range(20)),
    ]
    run = Sim(start("slo", gpu, num_blocks=450), gpu).play(asks)
    assert run.kept("r") == 1.0
    assert run.scheduler.stats().preemptions == 0
    assert run.now < 0.5 * Sim(start("no_evict", gpu, num_blocks=450), gpu).play(asks).now


@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize("num_blocks", [150, 400])
def test_optimism_is_never_slower_than_reserving_the_worst_case(num_blocks: int, max_tokens: int | None) -> None:
    """TensorRT-LLM#16827: MAX_UTILIZATION lost 40 % of throughput and had 9 times the TPOT p99 with memory short."""
    slo, no_evict = (
        Sim(start(name, gpu, num_blocks=num_blocks), gpu).play(crowd(max_tokens=max_tokens))
        for name in ("slo", "no_evict")
    )
    assert slo.now < 1.05 * no_evict.now
    assert slo.gap_s("r", 0.99) < 3 * no_evict.gap_s("r", 0.99)


@pytest.mark.parametrize("policy", OPTIMISTIC)
@pytest.mark.parametrize("depth", [2, 3])
def test_blocks_of_plans_in_flight_are_counted_when_memory_is_made(policy: str, depth: int) -> None:
    """vllm-ascend#16315: freed blocks came back late under async scheduling; the loop preempted everybody, 0 tok/s."""
    run = Run(make(num_blocks=14, policy=policy, prefix_caching=False), depth=depth)
    for number in range(6):
        run.submit(spec(f"r{number}", (number + 1,) * 8, 16, stop=()))
    progress = []
    while run.scheduler.has_work or run.in_flight:
        assert run.step()
        progress.append(sum(map(len, run.tokens.values())))
    longest = max(sum(at == value for at in progress) for value in set(progress))
    assert longest <= 6, "tokens keep coming"
    assert max(finish.preemptions for finish in run.finishes.values()) <= 4
    for number in range(6):
        assert run.tokens[f"r{number}"] == expected_output((number + 1,) * 8, 24, frozenset(), VOCAB)


@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_a_request_may_be_paused_again_and_again(policy: str) -> None:
    """TensorRT-LLM#9931, #9997: the second pause of the same request crashed."""
    run = Run(make(num_blocks=7, policy=policy, prefix_caching=False))
    for number in range(3):
        run.submit(spec(f"r{number}", (number + 1,) * 4, 20, stop=()))
        run.step()
    run.finish()
    for number in range(3):
        assert run.tokens[f"r{number}"] == expected_output((number + 1,) * 4, 24, frozenset(), VOCAB)
        assert run.finishes[f"r{number}"].output_tokens == 20


def test_nobody_is_preempted_without_end() -> None:
    """inference-sim#963: near-livelock in a simulator; vLLM itself needs at most 4 preemptions a request."""
    for seed in range(2):
        rng = random.Random(seed)
        asks = [
            ask(
                rng.uniform(0.0, 5.0),
                f"r{n}",
                rng.randrange(20, 400),
                rng.randrange(20, 400),
                kind=rng.choice(["chat", "batch"]),
            )
            for n in range(150)
        ]
        run = Sim(start("slo", gpu, num_blocks=rng.randrange(100, 200)), gpu).play(asks)
        vllm = Sim(start("decode_first", gpu, num_blocks=run.scheduler.config.num_blocks), gpu).play(asks)
        assert max(preemptions(run)) <= 3 + 2, "to make memory, and by the knob `displace`"
        assert sum(preemptions(run)) < sum(preemptions(vllm))


STRICT = replace(CHAT, overload=Overload.REJECT)


def test_a_queue_is_bounded_by_the_wait_it_predicts() -> None:
    """vllm#18826, #2901, #13395, #41250, #49445: the queue grows without bound, or is cut at some number."""
    asks = [ask(0.05 * n, f"r{n}", 300, 2) for n in range(100)]
    run = Sim(start("slo", classes=(STRICT, BATCH))).play(asks)
    assert len(run.refused) > 50
    assert all(answer.reason is RejectReason.OVERLOADED for answer in run.refused.values())
    assert all(life.finish for life in run.lives.values()), "nobody admitted is dropped"
    kept = sum(life.kept for life in run.lives.values())
    assert kept >= 0.9 * len(run.lives), "who was let in was in time"
    served = sum(life.kept for life in Sim(start("slo")).play(asks).lives.values())
    assert kept >= 0.8 * served, "and hardly anybody was refused who could have been"


def test_retry_after_is_when_it_would_have_been_taken() -> None:
    """vllm#41250: a 503 without a time to come back is answered by a storm of retries."""
    run = Sim(start("slo", classes=(STRICT, BATCH)))
    run.play([ask(0.0, f"r{n}", 300, 2) for n in range(20)], until_s=0.5)
    refused = run.scheduler.submit(ask(run.now, "late", 700, 2).spec, run.now)
    assert isinstance(refused, Rejected)
    assert refused.retry_after_s is not None
    run.play([ask(run.now + refused.retry_after_s + 0.7, "again", 700, 2)])
    assert run.kept("again") == 1.0


def test_a_request_that_missed_its_deadline_in_the_queue_does_not_cost_the_next_one_its_own() -> None:
    """vllm#49445, early drop: work on what is late already makes everybody late."""
    asks = [ask(0.0, f"early{n}", 500, 2) for n in range(20)] + [ask(4.0 + n, f"next{n}", 100, 2) for n in range(10)]
    assert Sim(start("slo")).play(asks).kept("next") == 1.0
    assert Sim(start("decode_first")).play(asks).kept("next") < 0.6


def test_a_class_has_a_queue_of_its_own_length() -> None:
    """vllm#49445: one bound for all lets one class's flood refuse another's single request."""
    bulk = TrafficClass("bulk", priority=2, queue_limit=5)
    run = Sim(start("slo", classes=(CHAT, bulk))).play(
        [*(ask(0.0, f"b{n}", 3000, 2, kind="bulk") for n in range(20)), ask(0.1, "chat", 50, 2)]
    )
    assert len(run.refused) >= 10
    assert all(name.startswith("b") and "class bulk" in answer.message for name, answer in run.refused.items())
    assert run.kept("chat") == 1.0


def test_prompts_under_way_find_the_memory_they_were_let_in_for() -> None:
    """vllm#37307 with streams beside: chunks are small, and what one prompt still needs is not given to the next."""
    streams = [ask(0.0, f"s{n}", 16, 150) for n in range(4)]
    run = Sim(start("slo", num_blocks=150, caching=False))
    run.play([*streams, *(ask(1.0 + 0.1 * n, f"r{n}", 800 - 5 * n, 150, ttft_s=60.0 - n) for n in range(10))])
    assert run.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("policy", OPTIMISTIC)
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=10),
    num_blocks=st.integers(15, 24),
    kinds=st.lists(st.sampled_from(["interactive", "standard", "batch"]), min_size=10, max_size=10),
)
def test_every_token_computed_is_useful_or_counted_as_computed_again(
    policy: str, lengths: list[tuple[int, int]], num_blocks: int, kinds: list[str]
) -> None:
    """vllm#18115, as a law of conservation, wherever in a step somebody gives way."""
    options = (("mixed", True), ("chunk", 12)) if policy == "prefill_first" else ()
    run = Run(make(num_blocks, policy=policy, policy_options=options, prefix_caching=False))
    for number, (prompt, outputs) in enumerate(lengths):
        run.submit(spec(f"r{number}", (number + 1,) * prompt, outputs, stop=(), traffic_class=kinds[number]))
        run.step()
    run.finish()
    useful = sum(prompt + outputs - 1 for prompt, outputs in lengths)
    assert sum(plan.num_tokens for plan in run.plans) == useful + run.scheduler.stats().recomputed_tokens


def test_the_slack_of_a_victim_is_weighed_against_its_work() -> None:
    """vllm#54644: slack for each token to compute again; those who are late already by their work alone."""

    def bears(planned: int, last_s: float, preempted: int = 0, kind: TrafficClass = CHAT) -> tuple[float, float]:
        request = Request(ask(0.0, "r", planned, 9).spec, kind, 0.0, max_model_len=9999)
        request.planned, request.preemptions = planned, preempted
        request.first_token_s, request.shown_s = 0.5, last_s
        return slack_per_token(request, 10.0)

    assert bears(100, 9.99) < bears(50, 9.99) < bears(50, 10.0), "in time: the one with more slack for its work"
    assert bears(500, 5.0) < bears(100, 2.0) < bears(500, 9.99), "late: the one with less work, after all in time"
    assert bears(500, 9.99) < bears(900, 9.99, kind=BATCH) < bears(100, 9.99, kind=BATCH), "no promise: before all"
    assert bears(100, 9.99, preempted=1) < bears(190, 9.99), "an eviction counts as as much again"


def test_two_that_hold_each_others_memory_do_not_wait_for_ever() -> None:
    """Of the same kind as vllm#37307: prompts half-way in, none can go on, and nobody is decoding."""
    for seed in range(6):
        rng = random.Random(seed)
        asks = [
            ask(rng.uniform(0.0, 0.3), f"r{n}", rng.randrange(200, 900), 30, kind=rng.choice(["chat", "batch"]))
            for n in range(12)
        ]
        run = Sim(start("slo", cpu, num_blocks=70, caching=False)).play(asks)
        assert all(life.finish for life in run.lives.values())


def test_displacement_evicts_nobody_in_vain() -> None:
    """Of the same kind: evicting all of lower priority and then finding that it was not enough."""
    held: list[StepPlan] = []
    run = Sim(start("slo", num_blocks=100, caching=False, classes=(CHAT, replace(BATCH, priority=2))))
    run.watch = lambda plan, seconds: held.append(plan)
    asks = [ask(0.0, "peer", 1000, 300, ttft_s=60.0), ask(3.0, "bulk", 200, 100, kind="batch")]
    run.play([*asks, ask(5.0, "large", 900, 2)], until_s=12.0)
    finish = run.lives["bulk"].finish
    assert run.scheduler.stats().preemptions == 0 or finish is not None
