"""A real vLLM 0.19 on an RTX 4090, request by request, and the same requests through our scheduler on its cost model.

Llama-3.1-8B, 300 requests in 29 s, 2,588 KV blocks of 16 tokens, 2,048 tokens a step: overloaded on purpose, it takes
184 s to drain. The blocks are the engine's own figure, as its log tells anybody; everything else is the datasheet and
the constants of the chip's generation and of the engine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.cost.host import HOSTS
from paceline.cost.scaled import ScaledCost
from paceline.simulate.drive import Limits, drive
from paceline.simulate.replica import Replica
from paceline.simulate.traffic import Arrival, ListTraffic

from .data import DATA, percentile

FOLDER = DATA / "vllm_measured"
BLOCKS, BLOCK_TOKENS, STEP_TOKENS, MOST_ROWS, MOST_TOKENS = 2588, 16, 2048, 256, 32768
ROUNDS = 4  # of the calibration
FOREVER = Limits(timeout_s=1e6, overload_s=1e6)


@dataclass(frozen=True)
class Request:
    """One request; seconds since the first was queued."""

    at_s: float
    first_s: float
    last_s: float
    prompt: tuple[int, ...]
    outputs: int


@dataclass(frozen=True)
class Figures:
    """Means and percentiles over some requests, seconds."""

    tpot_s: float
    e2e_s: float
    ttft_p50_s: float
    ttft_p90_s: float

    def errors(self, real: Figures) -> dict[str, float]:
        """Signed, relative."""
        return {name: getattr(self, name) / getattr(real, name) - 1.0 for name in self.__dataclass_fields__}


@cache
def requests() -> tuple[Request, ...]:
    """The recorded run. Prompts are made up: they share what the recorded 16-token blocks say."""
    times = _lines("RTX4090_Llama-3.1-8B.requests.jsonl")
    lengths = _lines("sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl")
    start_s = min(row["queued_ts"] for row in times)
    return tuple(
        Request(
            at_s=row["queued_ts"] - start_s,
            first_s=row["first_token_ts"] - start_s,
            last_s=row["last_token_ts"] - start_s,
            prompt=_prompt(row["input_toks"], blocks["hash_ids_16"], own=index),
            outputs=row["output_toks"],
        )
        for index, (row, blocks) in enumerate(zip(times, lengths, strict=True))
    )


def measured(chosen: Collection[int] | None = None) -> Figures:
    """Of the real run."""
    return _figures([r for i, r in enumerate(requests()) if chosen is None or i in chosen])


def simulated(cost: CostModel, chosen: Collection[int] | None = None) -> Figures:
    """All 300 requests simulated; figures of those chosen."""
    return _figures([r for i, r in run(cost) if chosen is None or i in chosen])


def run(cost: CostModel) -> list[tuple[int, Request]]:
    """Every request by its index, with the times that the simulator gives it."""
    config = SchedulerConfig(
        num_blocks=BLOCKS,
        max_model_len=MOST_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=MOST_ROWS,
        policy="vllm",
    )
    real = requests()
    arrivals = [
        Arrival(
            at_s=request.at_s,
            spec=RequestSpec(str(index), request.prompt, SamplingParams(temperature=0.0, max_tokens=request.outputs)),
            output_tokens=request.outputs,
            index=index,
        )
        for index, request in enumerate(real)
    ]
    done = drive(ListTraffic(arrivals), Replica("rtx-4090", config, cost), limits=FOREVER)
    return [
        (r.index, Request(real[r.index].at_s, r.read_s[0], r.read_s[-1], real[r.index].prompt, real[r.index].outputs))
        for r in done.records
    ]


def cost_model() -> AnalyticCost:
    """Datasheet, generation, engine."""
    return AnalyticCost(Deployment(find_model("llama-3.1-8b"), find_chip("rtx-4090")), host=HOSTS["vllm"])


def calibrated(cost: CostModel, chosen: Collection[int]) -> ScaledCost:
    """One factor on every step, such that the mean time between tokens of the chosen requests comes out.

    All are simulated, for those that are not chosen were there, too. Overload makes the time a token takes depend on
    little but the steps, so a few rounds of proportion find the factor.
    """
    wanted, scaled = measured(chosen).tpot_s, ScaledCost(cost, 1.0)
    for _ in range(ROUNDS):
        scaled = ScaledCost(cost, scaled.factor * wanted / simulated(scaled, chosen).tpot_s)
    return scaled


def _figures(chosen: list[Request]) -> Figures:
    waits = [r.first_s - r.at_s for r in chosen]
    return Figures(
        tpot_s=statistics.fmean((r.last_s - r.first_s) / (r.outputs - 1) for r in chosen if r.outputs > 1),
        e2e_s=statistics.fmean(r.last_s - r.at_s for r in chosen),
        ttft_p50_s=percentile(waits, 0.5),
        ttft_p90_s=percentile(waits, 0.9),
    )


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def _prompt(tokens: int, blocks: list[Any], own: int) -> tuple[int, ...]:
    """Ids that repeat where the recorded blocks do; what is beyond the last whole block is the request's own."""
    shared = [2 * block + 2 for block in blocks for _ in range(BLOCK_TOKENS)][:tokens]
    return (*shared, *((2 * own + 3,) * (tokens - len(shared))))
