"""Sarathi-Serve's capacity under its SLO rule, and its ablation.

    python benchmarks/papers/sarathi.py [--quick] [--json FILE]

Sarathi-Serve (OSDI'24): capacity is the highest Poisson rate with the P99 time between tokens within the SLO and a
median scheduling delay of at most 2 s. The SLO is derived: 5 (strict) or 25 (relaxed) times a decode-only iteration of
32 sequences with 4 K of context. Under strict SLOs it serves 2.6 times (Mistral-7B, one A100) and 3.7 times (Yi-34B,
two) what vLLM does at best over its datasets; read off its bars for the chat dataset, 2.15 and 2.44 times vLLM's and
2.78 and 4.00 times Orca's.

Ours: the same rule with our own iteration time (so that the SLO is as tight for us as the paper's for it); `orca` with
its batch of 16, `prefill_first` without cutting prompts (vLLM then) and `sarathi` with its chunks, batch 128. Lengths
are log-normal with the printed quantiles (chat: prompt p50 1730, p90 5696, output p50 415, p90 834), 8,192 in all.

The ablation (Yi-34B, P50 TTFT / P99 TBT in s on chat): mixed batches alone 0.53 / 0.68, chunks alone 1.04 / 0.17, both
0.76 / 0.14. Mixing alone leaves the stalls; chunks alone make newcomers wait; both trade a little TTFT for the lowest
TBT.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

from _paper import Engine, Length, Paper, arguments, highest, lognormal, poisson, quantile, requests, serve

from paceline.core.shape import StepShape
from paceline.simulate.fleet.report import FleetRun

MAX_LEN = 8192
STRICT, RELAXED = 5.0, 25.0
MOST_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and its GPUs in the paper's Table 2; bars read off its Figures 10 and 11, chat, strict."""

    engine: Engine
    start: float  # req/s
    slo_s: float  # strict, as the paper sets it
    over_orca: float
    over_vllm: float
    ablation_rate: float


MISTRAL = Setup(Engine("mistral-7b", "a100-pcie", max_model_len=MAX_LEN), 2.0, 0.1, 2.78, 2.15, 2.0)
YI = Setup(Engine("yi-34b", "a100-pcie", tp=2, max_model_len=MAX_LEN), 0.5, 0.2, 4.00, 2.44, 1.0)


def chat(count: int, seed: int) -> list[Length]:
    """openchat_sharegpt4's quantiles."""
    rng = random.Random(f"{seed}:chat")
    pairs = []
    for _ in range(count):
        prompt = lognormal(1730, 5696, rng, low=16, high=MAX_LEN - 64)
        pairs.append((prompt, lognormal(415, 834, rng, low=2, high=MAX_LEN - prompt)))
    return pairs


def slo_s(engine: Engine, factor: float) -> float:
    """The paper's rule on our step times."""
    return factor * engine.law().predict(StepShape(32, 32, 32 * 4096, 0)).seconds


def systems(engine: Engine, chunk: int) -> dict[str, Engine]:
    """The three schedulers on one engine."""
    return {
        "Orca": replace(engine, policy="orca", max_num_seqs=16),
        "vLLM": replace(engine, policy="prefill_first", options=(("chunk", 0),), max_num_seqs=128),
        "Sarathi": replace(engine, policy="sarathi", options=(("chunk", chunk),), max_num_seqs=128),
    }


def gaps_s(run: FleetRun) -> list[float]:
    """All times between two tokens of a request."""
    return [gap for journey in run.done for gap in journey.gaps_s()]


def capacity(engine: Engine, start: float, pairs: list[Length], limit_s: float, seed: int, tolerance: float) -> float:
    """Highest rate within the SLO and the scheduling delay."""
    members = [("a", engine.blueprint())]

    def holds(rate: float) -> bool:
        run = serve(members, requests(poisson(rate, len(pairs), seed), pairs))
        delays = [(j.finish.scheduled_s or 0.0) - j.arrival.at_s for j in run.done if j.finish is not None]
        return quantile(delays, 0.5) <= MOST_DELAY_S and quantile(gaps_s(run), 0.99) <= limit_s

    return highest(holds, start, tolerance=tolerance)


def compare(paper: Paper, setup: Setup, count: int, seed: int, tolerance: float, *, relaxed: bool) -> None:
    """Capacity of the three, under the strict or the relaxed SLO."""
    factor, chunk, name = (RELAXED, 2048, "relaxed") if relaxed else (STRICT, 512, "strict")
    limit_s = slo_s(setup.engine, factor)
    model = setup.engine.model
    paper.setting(f"{model}, {name}", f"chunk {chunk}")
    paper.row(f"{model}, {name}: P99 TBT allowed", setup.slo_s * factor / STRICT, limit_s, "s", within=0.3)
    pairs = chat(count, seed)
    found = {}
    for system, engine in systems(setup.engine, chunk).items():
        found[system] = capacity(engine, setup.start, pairs, limit_s, seed, tolerance)
        paper.row(f"{model}, {name}: {system}", None, found[system], "req/s")
    for other, published in (("vLLM", setup.over_vllm), ("Orca", setup.over_orca)):
        ratio = found["Sarathi"] / found[other] if found[other] else float("inf")
        label = f"{ratio:.2f}x" if found[other] else "none holds"
        checked = None if relaxed else published / 2 <= ratio <= published * 2
        paper.row(f"{model}, {name}: Sarathi over {other}", "-" if relaxed else f"{published:g}x", label, holds=checked)


def ablation(paper: Paper, setup: Setup, count: int, seed: int) -> None:
    """Mixed batches alone, chunks alone, both: at one rate."""
    published = {"mixed alone": (0.53, 0.68), "chunks alone": (1.04, 0.17), "both": (0.76, 0.14)}
    engine, pairs = replace(setup.engine, max_num_seqs=128), chat(count, seed)
    variants = {
        "mixed alone": replace(engine, policy="decode_first", options=(("chunked", False),), budget=MAX_LEN),
        "chunks alone": replace(engine, policy="prefill_first", options=(("chunk", 512), ("interval", 1))),
        "both": replace(engine, policy="sarathi", options=(("chunk", 512),)),
    }
    ttft, tbt = {}, {}
    for name, variant in variants.items():
        arrivals = requests(poisson(setup.ablation_rate, count, seed), pairs)
        run = serve([("a", variant.blueprint())], arrivals)
        ttft[name] = quantile([journey.ttft_s or 0.0 for journey in run.done], 0.5)
        tbt[name] = quantile(gaps_s(run), 0.99)
        paper.row(f"{setup.engine.model}, {name}: P50 TTFT", published[name][0], ttft[name], "s")
        paper.row(f"{setup.engine.model}, {name}: P99 TBT", published[name][1], tbt[name], "s")
    order = tbt["both"] <= tbt["chunks alone"] < tbt["mixed alone"]
    paper.row("TBT: both <= chunks alone < mixed alone", "yes", "yes" if order else "no", holds=order)
    order = ttft["mixed alone"] < ttft["both"] < ttft["chunks alone"]
    paper.row("TTFT: mixed alone < both < chunks alone", "yes", "yes" if order else "no", holds=order)


def main() -> int:
    args = arguments(__doc__)
    paper = Paper("Capacity of chunked, stall-free batches", "Sarathi-Serve, OSDI'24, and its artifact", args)
    count, tolerance = (160, 0.15) if args.quick else (1024, 0.05)
    paper.setting("capacity", f"highest Poisson rate; {count} requests a probe; median scheduling delay <= 2 s")
    for setup in (MISTRAL, YI):
        compare(paper, setup, count, args.seed, tolerance, relaxed=False)
        if not args.quick:
            compare(paper, setup, count, args.seed, tolerance, relaxed=True)
    ablation(paper, YI, 2 * count, args.seed)
    return paper.finish()


if __name__ == "__main__":
    sys.exit(main())
