"""The first steps of an engine, before anybody waits for them.

They pay for what a backend sets up on first use, and they teach the cost model: a prefill, one stream, a few streams at
once. They go through the scheduler like any traffic, so a call log holds them and a replay learns the same.
"""

from __future__ import annotations

from paceline.core.protocols import Backend, CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape
from paceline.core.step import Accepted, RequestSpec
from paceline.engine.loop import EngineLoop

ROUNDS = ((1, 4, 2), (1, 96, 6), (8, 24, 6))  # requests at once, prompt tokens of each, new tokens of each
TYPICAL_PROMPT, TYPICAL_ANSWER = 128, 64  # tokens; what promises are held against at start-up


def warm_up(scheduler: Scheduler, backend: Backend, vocab_size: int) -> None:
    """Run the rounds that fit, then forget their prefixes and counters. Raises what the backend raises."""
    loop = EngineLoop(scheduler, backend)
    config = scheduler.config
    most = min(config.max_model_len, config.num_blocks * config.block_size)
    for turn, (count, size, new) in enumerate(ROUNDS):
        for number in range(min(count, config.max_num_seqs)):
            size = max(1, min(size, most // 2))
            spec = RequestSpec(
                f"warm-up-{turn}-{number}",
                tuple((17 * position + 31 * number + turn) % vocab_size for position in range(size)),
                SamplingParams(temperature=0.0, max_tokens=new),
                cache_salt="warm-up",
                traffic_class=config.classes[0].name,
            )
            answer = loop.submit(spec)
            assert isinstance(answer, Accepted), answer
        for _ in loop.run():
            pass
    scheduler.start_over()


def infeasible_promises(scheduler: Scheduler) -> list[str]:
    """A sentence for each promise that not even one request alone would see kept, with what is feasible."""
    cost = scheduler.cost
    if cost is None or not cost.ready:
        return []
    gap_s = cost.predict(StepShape().plus(TYPICAL_PROMPT, 1)).seconds
    first_s = _prefill_s(cost, TYPICAL_PROMPT)
    found = []
    for kind in scheduler.config.classes:
        if kind.itl_s is not None and gap_s > kind.itl_s:
            found.append(
                f"class {kind.name} promises {1000 * kind.itl_s:g} ms between tokens; here one request alone takes "
                f"about {1000 * gap_s:.0f} ms: promise at least that"
            )
        if kind.ttft_s is not None and first_s > kind.ttft_s:
            found.append(
                f"class {kind.name} promises the first token within {1000 * kind.ttft_s:g} ms; here one prompt of "
                f"{TYPICAL_PROMPT} tokens alone takes about {1000 * first_s:.0f} ms: promise at least that"
            )
        whole_s = first_s + (TYPICAL_ANSWER - 1) * gap_s
        if kind.e2e_s is not None and whole_s > kind.e2e_s:
            found.append(
                f"class {kind.name} promises the last token within {1000 * kind.e2e_s:g} ms; here {TYPICAL_ANSWER} "
                f"tokens for one prompt of {TYPICAL_PROMPT} alone take about {1000 * whole_s:.0f} ms: "
                f"promise at least that"
            )
    return found


def _prefill_s(cost: CostModel, tokens: int) -> float:
    return cost.predict(StepShape().plus(0, tokens)).seconds
