"""Order, starvation, fairness and priority: who waits for whom, and for how long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.core.classes import BATCH, INTERACTIVE, STANDARD, TrafficClass
from paceline.core.shape import StepShape
from paceline.core.step import StepPlan
from tests.core.known_failures.rig import CHAT, Ask, Sim, ask, conversation, cpu, gpu, poisson, start

THREE = (INTERACTIVE, STANDARD, BATCH)


def jain(shares: list[float]) -> float:
    """Jain's index of fairness: 1 when all have the same."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.parametrize("lack", ["seats", "memory"])
def test_a_waiting_request_of_higher_priority_takes_the_place_of_a_lower_one(lack: str) -> None:
    """vllm#40004 (45561, 54530): at max_num_seqs, high priority waits until low priority has ended."""
    limits = {"max_num_seqs": 4} if lack == "seats" else {"num_blocks": 80}
    bulk = [ask(0.0, f"bulk{n}", 250, 600, kind="batch") for n in range(4)]
    run = Sim(start("slo", **limits)).play([*bulk, ask(5.0, "chat", 100, 20)])  # type: ignore[arg-type]
    assert run.kept("chat") == 1.0
    evictions = [life.finish.preemptions for life in run.of("bulk") if life.finish]
    assert sum(evictions) >= 1
    if lack == "seats":
        vllm = Sim(start("decode_first", order="priority", **limits))  # type: ignore[arg-type]
        asked = [replace(one, spec=replace(one.spec, priority=10)) for one in bulk]
        assert vllm.play([*asked, ask(5.0, "chat", 100, 20, priority=0)]).ttft_s("chat") > 15.0


def test_equals_never_displace_each_other_and_nobody_is_displaced_without_end() -> None:
    """vllm#40004, the other half: no ping-pong."""
    equals = [ask(0.1 * n, f"r{n}", 100, 100) for n in range(12)]
    run = Sim(start("slo", max_num_seqs=4)).play(equals)
    assert run.scheduler.stats().preemptions == 0

    bulk = [ask(0.0, f"bulk{n}", 250, 600, kind="batch") for n in range(4)]
    chats = [ask(2.0 + 0.7 * n, f"c{n}", 60, 10) for n in range(100)]
    run = Sim(start("slo", max_num_seqs=4)).play([*bulk, *chats])
    assert all(life.finish.preemptions <= 2 for life in run.of("bulk") if life.finish), "the knob `displace`"
    assert run.kept("c") > 0.9


def test_high_priority_under_low_priority_load_is_nearly_as_fast_as_alone() -> None:
    """vllm#24365: "high priority not work": 8 s alone became 16 s under a load of priority 10."""
    chats = [ask(3.0 + 4.0 * n, f"c{n}", 200, 50) for n in range(8)]
    load = [ask(0.2 * n, f"bulk{n}", 400, 200, kind="batch") for n in range(60)]
    alone, loaded = Sim(start("slo")).play(chats), Sim(start("slo")).play(load + chats)
    assert loaded.kept("c") == 1.0
    took, under = (max(life.times[-1] - life.ask.at_s for life in run.of("c")) for run in (alone, loaded))
    assert took < under <= 50 * 0.1 + 2.0, "within what was promised, the load notwithstanding"
    vllm = Sim(start("decode_first")).play(load + chats)
    assert vllm.kept("c") == 0.0


@pytest.mark.parametrize("starved", ["standard", "batch"])
def test_no_class_waits_for_ever_under_load_of_a_higher_one(starved: str) -> None:
    """vllm#20608: priorities do not age; the low ones starve."""
    flood = poisson(random.Random(5), "i", 6.0, (0.0, 60.0), conversation, kind="interactive")  # three times too much
    low = [ask(5.0 + 8.0 * n, f"low{n}", 60, 10, kind=starved) for n in range(6)]
    run = Sim(start("slo", classes=THREE)).play([*flood, *low], until_s=120.0)
    waits = [life.ttft_s for life in run.of("low")]
    assert max(waits) < 30.0, waits  # a tenth of a machine that is asked for three times what it can do


def test_the_late_of_one_class_do_not_shut_out_the_others() -> None:
    """Of the same kind: in a line of late requests by priority, the lowest would wait for all higher ones."""
    flood = [ask(0.0, f"i{n}", 400, 4, kind="interactive") for n in range(200)]  # 170 s of work, late at once
    run = Sim(start("slo", classes=THREE)).play(
        [*flood, ask(1.0, "s", 400, 4, kind="standard", ttft_s=0.5), ask(1.0, "b", 400, 4, kind="batch")]
    )
    assert run.ttft_s("s") < 30.0
    assert run.ttft_s("b") < 40.0


@pytest.mark.parametrize("kind", ["chat", "batch"])
def test_who_was_preempted_goes_on_before_its_equals_begin(kind: str) -> None:
    """vllm#41951: preempted requests lose their place in the priority heap."""
    run = Sim(start("slo", num_blocks=100, caching=False))

    def watch(plan: StepPlan, seconds: float) -> None:
        left_lying = [request for request in run.scheduler._waiting.values() if request.preemptions]
        assert not (left_lying and any(not admission.outputs for admission in plan.admitted))

    run.watch = watch
    run.play([ask(0.01 * n, f"r{n:02d}", 100, 150, kind=kind, ttft_s=200.0) for n in range(40)])
    evicted = [life.finish.preemptions for life in run.lives.values() if life.finish]
    assert sum(evicted) > 0, "memory was short"
    assert max(evicted) <= 2


def prefix_traffic() -> list[Ask]:
    """Nineteen of twenty share a hot prefix; the machine is just about full."""
    rng, hot = random.Random(2), tuple(range(100, 612))
    asks: list[Ask] = []
    at = 0.0
    while at < 60.0:
        at += rng.expovariate(3.0)
        name = f"{'hot' if len(asks) % 20 else 'cold'}{len(asks)}"
        asks.append(ask(at, name, (*hot, 5000 + len(asks), *(7,) * 120) if len(asks) % 20 else 500, 4))
    return asks


def test_cold_requests_are_not_left_behind_a_hot_prefix() -> None:
    """sglang#31723, #32911: lpm does not age; the cold 5 % wait 20 to 60 s and are 75 % of the total TTFT."""
    classes = (replace(CHAT, ttft_s=5.0), BATCH)
    lpm, hrrn = (
        Sim(start("prefill_first", order=order, chunk=256, classes=classes)).play(prefix_traffic())
        for order in ("lpm", "hrrn")
    )
    slo = Sim(start("slo", classes=classes)).play(prefix_traffic())
    assert hrrn.ttft_s("cold") < 0.7 * lpm.ttft_s("cold")
    assert slo.ttft_s("cold") < min(5.0, 0.9 * lpm.ttft_s("cold")), "all in time"
    assert slo.kept() > 0.98
    assert max(lpm.kept(), hrrn.kept()) < 0.2


def test_who_was_preempted_in_an_answer_comes_before_newcomers_who_keep_coming() -> None:
    """vllm#41951: a long context takes many steps to compute again, and each of them has newcomers in it."""
    run = Sim(start("slo", num_blocks=150, caching=False))
    asks = [ask(0.0, "long", 1200, 400, itl_s=2.0), *(ask(8.0 + 0.3 * n, f"c{n}", 60, 30) for n in range(150))]
    asks += [ask(6.0, f"s{n}", 100, 250) for n in range(6)]
    run.play(asks)
    finish = run.lives["long"].finish
    assert finish is not None
    assert finish.preemptions > 0
    assert run.worst_gap_s("long") < 20.0


def test_prefix_hits_count_in_the_estimate_of_who_can_still_make_it() -> None:
    """Of the same kind: a prompt that is nearly all cached needs no time and must not be given up as late."""
    hot = tuple(range(100, 1300))
    asks = [ask(0.0, "first", hot, 2, ttft_s=10.0), ask(5.0, "again", (*hot, 9), 2, ttft_s=1.2)]
    asks += [ask(4.9, f"bulk{n}", 600, 2, kind="batch") for n in range(4)]
    assert Sim(start("slo")).play(asks).kept("again") == 1.0


def test_a_flood_of_one_tenant_delays_the_flooder() -> None:
    """vllm#31909, #7123, llm-d-router#1182: first come, first served lets one tenant take it all."""
    flood = [ask(0.0, f"a{n}", 200, 20, tenant="a") for n in range(100)]
    other = [ask(1.0 + 3.0 * n, f"b{n}", 200, 20, tenant="b") for n in range(8)]
    alone, together = Sim(start("slo")).play(other), Sim(start("slo")).play(flood + other)
    assert together.kept("b") == 1.0
    assert together.ttft_s("b", 0.95) <= 1.5 * alone.ttft_s("b", 0.95) + 0.1 * 5, "and a few paced steps of the others"


@pytest.mark.parametrize("kind", ["chat", "batch"])
def test_tenants_who_all_want_more_than_there_is_get_the_same(kind: str) -> None:
    """vllm#31909: Jain's index of what tenants got."""
    asks: list[Ask] = []
    for tenant, (prompt, count) in {"a": (100, 400), "b": (400, 100), "c": (200, 200)}.items():
        asks += [ask(0.001 * n, f"{tenant}{n}", prompt, 4, kind=kind, tenant=tenant) for n in range(count)]
    run = Sim(start("slo")).play(asks, until_s=40.0)
    had = [sum(len(life.ask.spec.prompt) for life in run.of(t) if life.times) for t in "abc"]
    assert jain([float(tokens) for tokens in had]) > 0.98, had


def test_what_a_quiet_tenant_sends_goes_before_a_flood() -> None:
    """Turn by turn, its third prompt would wait for three of the flood, though it has had less than its share."""
    flood = [ask(0.0, f"a{n}", 200, 20, tenant="a") for n in range(150)]
    other = [ask(2.0 + 6.0 * n + 0.01 * m, f"b{n}-{m}", 100, 20, tenant="b") for n in range(4) for m in range(3)]
    alone, together = Sim(start("slo")).play(other), Sim(start("slo")).play(flood + other)
    assert together.kept("b") == 1.0
    assert together.ttft_s("b", 0.95) <= 2.0 * alone.ttft_s("b", 0.95)


@pytest.mark.parametrize("every_s", [0.6, 0.9])
def test_a_flood_spends_none_of_the_time_that_is_spared_for_a_quiet_tenant(every_s: float) -> None:
    """Of the same kind: streams of the flood keep their pace, so a newcomer lives on what they have saved up."""

    def small(shape: StepShape) -> float:
        return 0.018 + 0.00075 * shape.tokens + 1e-6 * shape.context + 2e-7 * shape.pairs

    kind = TrafficClass("chat", ttft_s=3.5, itl_s=0.075)
    flood = [ask(0.19 * n, f"a{n}", 150, 25, tenant="a") for n in range(200)]
    lengths, offsets_s = (400, 150, 60), [0.0137 * (7 * n % 11) for n in range(30)]
    other = [ask(8.0 + every_s * n + at_s, f"b{n}", lengths[n % 3], 25, tenant="b") for n, at_s in enumerate(offsets_s)]
    alone, together = (
        Sim(start("slo", small, classes=(kind, BATCH)), small).play(asks) for asks in (other, flood + other)
    )
    assert together.ttft_s("b", 0.95) <= 1.65 * alone.ttft_s("b", 0.95), "the step it met, and others' decodes"
    assert max(together.gap_s("a", 1.0), together.gap_s("b", 1.0)) <= 0.075, "nobody's pace pays for it"
    equals = [replace(one, spec=replace(one.spec, tenant="")) for one in flood + other]
    took_s = Sim(start("slo", small, classes=(kind, BATCH)), small).play(equals).now
    assert together.now < 1.25 * took_s, "and the machine little"


def test_a_tenant_that_was_away_has_saved_up_a_few_prompts_at_most() -> None:
    """Of the same kind: credit from an idle hour would let a returning tenant shut all others out."""
    steady = [ask(0.5 * n, f"a{n}", 200, 2, tenant="a", kind="batch") for n in range(160)]
    back = [ask(60.0, f"b{n}", 200, 2, tenant="b", kind="batch") for n in range(60)]  # half a minute of work
    run = Sim(start("slo")).play(steady + back)
    between = [life.times[0] for life in run.of("a") if 60.0 <= life.ask.at_s <= 75.0]
    assert sum(at < run.lives["b30"].times[0] for at in between) > 18, "after ten prompts they take turns"


def test_short_prompts_are_not_held_up_by_long_ones_and_no_order_loses_anybody() -> None:
    """vllm#29366, #29406, #25567, vllm-ascend#16360: head-of-line blocking; the same trace under every order."""
    rng = random.Random(4)
    asks = [
        ask(0.25 * n, f"{'long' if n % 8 == 0 else 'short'}{n}", rng.randrange(900, 1400) if n % 8 == 0 else 60, 4)
        for n in range(120)
    ]
    runs = {
        order: Sim(start("prefill_first", order=order, chunk=256)).play(asks)
        for order in ("fcfs", "lpm", "dfs_weight", "lof", "hrrn")
    }
    runs["slo"] = Sim(start("slo")).play(asks)
    assert all(len(run.lives) == 120 and all(life.finish for life in run.lives.values()) for run in runs.values())
    assert runs["hrrn"].ttft_s("short", 0.5) < runs["fcfs"].ttft_s("short", 0.5)
    assert runs["slo"].ttft_s("short", 0.95) < runs["fcfs"].ttft_s("short", 0.95)
    assert runs["slo"].kept("short") > 0.95


@pytest.mark.parametrize("policy", ["decode_first", "orca", "prefill_first", "no_evict", "max_utilization", "sarathi"])
def test_first_come_first_served_is_just_that(policy: str) -> None:
    """Of the same kind: identical requests are served in the order they came, under every first-come policy."""
    asks = [ask(0.01 * n, f"r{n:02d}", 150, 30) for n in range(30)]
    run = Sim(start(policy, gpu, num_blocks=200), gpu).play(asks)
    firsts = [run.lives[f"r{n:02d}"].times[0] for n in range(30)]
    assert firsts == sorted(firsts)


def test_weight_of_a_class_counts_among_the_late() -> None:
    """Of the same kind: weights share what is left; the heavier class gets more of it, the lighter one some."""
    heavy = TrafficClass("heavy", ttft_s=0.5, itl_s=0.1, weight=4.0)
    light = TrafficClass("light", ttft_s=0.5, itl_s=0.1, weight=1.0)
    asks = [ask(0.0, f"h{n}", 300, 2, kind="heavy") for n in range(60)]
    asks += [ask(0.0, f"l{n}", 300, 2, kind="light") for n in range(60)]
    run = Sim(start("slo", cpu, classes=(heavy, light))).play(asks, until_s=35.0)
    done = {name: sum(bool(life.times) for life in run.of(name)) for name in "hl"}
    assert 2.5 < done["h"] / done["l"] < 6.0, done
