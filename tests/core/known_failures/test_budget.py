"""SLO, deadlines and budget tuning: what users of constant budgets ask for."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from paceline.core.classes import BATCH, TrafficClass
from paceline.core.shape import StepShape
from paceline.core.step import Bound
from paceline.cost.online import OnlineCost
from tests.core.known_failures.rig import CHAT, Ask, Law, Sim, ask, conversation, cpu, gpu, poisson, start

LOADS = (0.5, 1.0, 2.0)  # requests a second


def streams(count: int, outputs: int, *, prompt: int = 32, **fields: Any) -> list[Ask]:
    """Steady generations that all begin at once."""
    return [ask(0.0, f"s{number}", prompt, outputs, **fields) for number in range(count)]


def test_no_constant_budget_is_best_at_every_load_and_slo_is() -> None:
    """vllm#52906: no static max_num_batched_tokens suits all loads; the budget has to follow the pressure."""
    kept: dict[str | int, list[float]] = {}
    for load in LOADS:
        asks = poisson(random.Random(1), "r", load, (0.0, 90.0), conversation)
        for chunk in (16, 32, 64, 256):
            kept.setdefault(chunk, []).append(Sim(start("sarathi", chunk=chunk)).play(asks).kept())
        kept.setdefault("slo", []).append(Sim(start("slo")).play(asks).kept())
    slo = kept.pop("slo")
    best = [max(column) for column in zip(*kept.values(), strict=True)]
    assert all(ours >= static for ours, static in zip(slo, best, strict=True)), (slo, kept)
    assert fmean(slo) > 1.2 * max(map(fmean, kept.values()))


def test_targets_of_one_request_decide_its_place_the_budget_and_who_gives_way() -> None:
    """vllm#53571: an SLO that only reorders the queue, by class, is not enough."""
    run = Sim(start("slo")).play([ask(0.0, f"r{n}", 600, 2, ttft_s=20.0 - n) for n in range(6)])
    firsts = [run.lives[f"r{n}"].times[0] for n in range(6)]
    assert firsts == sorted(firsts, reverse=True), "place: the last to come has the earliest deadline"

    widths = []
    for itl_s in (0.06, 0.1, 0.2):
        run = Sim(start("slo")).play([*streams(4, 60, itl_s=itl_s), ask(0.5, "new", 900, 2, ttft_s=30.0)])
        assert run.worst_gap_s("s") <= itl_s
        widths.append(run.ttft_s("new"))
    assert widths == sorted(widths, reverse=True), "budget: the looser the pace, the sooner the newcomer's token"

    tight = [ask(0.0, f"tight{n}", 160, 200, itl_s=0.08) for n in range(2)]
    loose = [ask(0.0, f"loose{n}", 160, 200, itl_s=2.0) for n in range(2)]
    run = Sim(start("slo", num_blocks=60, caching=False)).play([*tight, *loose])
    assert sum(life.finish.preemptions for life in run.of("loose") if life.finish) > 0
    assert sum(life.finish.preemptions for life in run.of("tight") if life.finish) == 0, "who gives way: the slack one"


@pytest.mark.parametrize("law", [cpu, gpu])
def test_the_cost_of_a_step_is_learned_on_any_machine(law: Law) -> None:
    """vllm-ascend#3328: a cost table precomputed for one device."""
    kind = replace(CHAT, itl_s=5 * law(StepShape(8, 8, 800, 0)))
    run = Sim(start("slo", law, cost=OnlineCost(), classes=(kind, BATCH)), law)
    run.play([ask(0.02 * n, f"warm{n}", 50 * n + 10, 12) for n in range(8)])
    at = run.now
    run.play(
        [ask(at, f"s{n}", 32, 300) for n in range(8)]
        + [ask(at + n * 60 * law(StepShape(8)), f"n{n}", 1500, 2, ttft_s=60.0) for n in range(6)]
    )
    assert run.gap_s("s", 0.97) <= kind.itl_s  # type: ignore[operator]
    assert all(life.finish is not None for life in run.of("n"))


def test_the_decode_batch_grows_only_as_far_as_its_pace_holds() -> None:
    """sglang#28365: nothing bounds the decode batch, and at some size everyone's next token is late."""
    asks = [ask(0.05 * n, f"r{n}", 20, 150, ttft_s=60.0) for n in range(80)]
    run = Sim(start("slo")).play(asks)
    assert run.gap_s("r", 0.95) <= 0.1
    assert run.kept() == 1.0, "all 80, one after the other"
    assert Sim(start("decode_first")).play(asks).kept() < 0.5


def test_a_burst_of_short_prompts_does_not_become_a_batch_too_large_for_its_pace() -> None:
    """sglang#28365, from idle: all 80 prompts fit into one step, their 80 decodes do not fit into 100 ms."""
    run = Sim(start("slo")).play([ask(0.0, f"r{n}", 4, 50, ttft_s=60.0) for n in range(80)])
    assert run.gap_s("r", 0.95) <= 0.1
    assert run.kept() == 1.0


def test_a_pace_nobody_could_keep_alone_bounds_nothing() -> None:
    """Of the same kind: obeying an impossible target would serve one request at a time."""
    asks = [ask(0.0, f"r{n}", 20, 30, itl_s=0.001) for n in range(20)]
    run = Sim(start("slo")).play(asks)
    assert run.now < 1.3 * Sim(start("decode_first")).play(asks).now


def test_one_tight_request_does_not_make_everyone_else_wait() -> None:
    """Of the same kind: a pace that is possible alone but not in the present crowd costs only its own promise."""
    asks = [*streams(30, 200), ask(1.0, "tight", 20, 50, itl_s=0.04)]
    asks += [ask(1.5 + n, f"n{n}", 40, 10) for n in range(4)]
    run = Sim(start("slo")).play(asks)
    assert run.gap_s("s", 0.95) <= 0.1
    assert run.kept("n") == 1.0
    assert run.ttft_s("tight") <= 2.0


def test_prompts_under_way_are_few() -> None:
    """vllm#10061: dynamic chunks were refused because many half-done prompts would hoard KV memory."""
    run = Sim(start("slo"))
    most = 0

    def watch(*_: object) -> None:
        nonlocal most
        scheduler = run.scheduler
        most = max(most, sum(request.prefilling for request in scheduler._running))

    run.watch = watch
    asks = [ask(0.3 * n, f"r{n}", 700, 4, ttft_s=90.0 - 2.0 * n) for n in range(30)]  # each more urgent than the last
    run.play([*streams(8, 300), *asks])
    assert most <= 4, "the knob `partial`"
    assert len(run.of("r")) == 30


def test_chunks_shrink_so_that_steps_take_the_same_time_however_long_the_prefix() -> None:
    """vllm#41247, #33914: chunks of equal length take longer and longer; a fit over prefix and chunk knows."""

    def quadratic(shape: StepShape) -> float:
        return 0.01 + 1e-4 * shape.tokens + 1e-7 * shape.pairs

    chunks: list[tuple[int, float]] = []
    run = Sim(start("slo", quadratic, classes=(replace(CHAT, itl_s=0.1), BATCH), pace="gap"), quadratic)
    run.watch = lambda plan, seconds: chunks.append((max(plan.counts), seconds)) if "long" in plan.ids else None
    run.play([*streams(4, 200), ask(0.1, "long", 12_000, 1, ttft_s=100.0)])
    sizes = [size for size, _ in chunks[1:-1]]
    assert sizes[-1] < sizes[0] / 1.5
    assert all(abs(seconds - 0.1) < 0.012 for size, seconds in chunks[1:-1]), chunks
    cost = run.scheduler.cost
    assert isinstance(cost, OnlineCost)
    assert cost.errors()[0] < 0.05, "median error of the fit on its own steps"


def test_a_reader_at_the_promised_pace_never_stalls_when_early_tokens_are_buffered() -> None:
    """vllm#30101: the stream stutters whenever a prompt arrives; tokens that came early should pay for it."""
    asks = [*streams(6, 120), *(ask(1.0 + 2.0 * n, f"n{n}", 500, 2) for n in range(4))]
    run = Sim(start("slo", pace="timeline")).play(asks)
    for life in run.of("s"):
        assert all(at <= life.times[0] + 0.1 * turn + 1e-9 for turn, at in enumerate(life.times))
    assert run.ttft_s("n") < Sim(start("slo")).play(asks).ttft_s("n"), "and the slack goes to newcomers"


@pytest.mark.parametrize("policy", ["decode_first", "slo"])
def test_one_request_gets_the_whole_budget_however_many_might_run(policy: str) -> None:
    """vllm#51725: the budget was reserved for max_num_seqs, of which few ran."""
    run = Sim(start(policy, gpu, budget=8192, max_num_seqs=1024), gpu)
    widest = 0

    def watch(plan: object, seconds: float) -> None:
        nonlocal widest
        widest = max(widest, plan.num_tokens)  # type: ignore[attr-defined]

    run.watch = watch
    run.play([ask(0.0, "only", 8000, 2)])
    assert widest >= 7900


def test_the_step_says_what_bound_it() -> None:
    """Of the same kind: nobody could see why a step was as small as it was."""
    run = Sim(start("slo"))
    seen: dict[Bound, int] = {}
    run.watch = lambda plan, seconds: seen.update({plan.bound_by: seen.get(plan.bound_by, 0) + 1})
    run.play([*streams(8, 60), ask(0.5, "new", 800, 2)])
    assert seen[Bound.DEADLINE] > 5
    assert seen[Bound.NOTHING] > 20
    full = Sim(start("slo", num_blocks=30))
    full.watch = lambda plan, seconds: seen.update({plan.bound_by: seen.get(plan.bound_by, 0) + 1})
    full.play([ask(0.0, f"r{n}", 150, 40) for n in range(4)])
    assert seen[Bound.MEMORY] > 0


def test_a_percentile_stricter_than_the_usual_leaves_more_room() -> None:
    """Of the same kind: on a noisy machine the budget must depend on how often the promise may be broken."""
    shares = []
    for percentile in (0.5, 0.95, 0.999):
        rng = random.Random(3)
        kind = TrafficClass("chat", ttft_s=2.0, itl_s=0.1, percentile=percentile)
        noisy: Law = lambda shape: cpu(shape) * rng.lognormvariate(0.0, 0.08)  # noqa: B023, E731
        run = Sim(start("slo", noisy, classes=(kind, BATCH), pace="gap"), noisy)
        run.play([*streams(8, 400), *(ask(1.0 + n, f"b{n}", 1200, 2, kind="batch") for n in range(10))])
        gaps = [gap for life in run.of("s") for gap in life.gaps]
        shares.append(sum(gap > 0.1 for gap in gaps) / len(gaps))
    assert shares[0] > shares[1] > shares[2]
    assert shares[1] <= 0.07
    assert shares[2] <= 0.01
