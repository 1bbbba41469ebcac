"""DistServe: goodput per GPU of prefill and decode apart, against vLLM of its day, per workload.

    python benchmarks/papers/distserve.py [--quick] [--json FILE]

DistServe (OSDI'24) counts the highest request rate per GPU at which 90 % of the requests meet both a time to first
token and a time per output token. Its artifact's plots give the objectives and the GPUs of each side; the paper gives
ranges: ShareGPT 2.0 to 4.6 times vLLM's rate, HumanEval (code completion) 5.7, LongBench (summarisation) 4.3. The often
cited 7.4 is against another baseline. For OPT-66B on ShareGPT a summary prints other objectives (2.5 s, 0.15 s) than
the artifact plots (0.4 s, 0.1 s); we take the artifact's. OPT-175B is left out: its placement is of nine pipeline
stages, which our engines do not overlap.

Ours: `prefill_first` without cutting prompts, which is how vLLM scheduled in 2023, against a prefill pool and a decode
pool joined by NVLink. Lengths are log-normal with the means of the paper's Figure 7 and a 90 % point of about twice the
mean (the pairs themselves are not published with it); LongBench is cut to OPT's context, as there. DistServe's
authors measured the steps of both engines on OPT-13B (the artifact's profile: milliseconds for T prompt tokens, B
sequences, C tokens of context). Against our model's steps DistServe's engine is level and vLLM's a third longer in
prefill; the factors are carried over to OPT-66B. Since the objectives lie close to what one long prompt takes alone
(OPT-13B on vLLM: 1,500 tokens in 0.25 s), a fifth in the speed of an engine moves a 90 % goodput by a multiple. So the
baseline runs at three speeds: as fast as DistServe's, as measured, and a quarter slower still, which stands for what
the factor cannot know of tensor-parallel workers in 2023 that were called over Ray in every step.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

from _paper import Engine, Length, Paper, arguments, highest, lognormal, poisson, requests, serve

from paceline.core.protocols import CostModel, Estimate
from paceline.core.shape import StepShape
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.link import LinkSpec

NVLINK = LinkSpec(200e9, 1e-4)
ATTAINMENT = 0.90
ORDER = 10**0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset and model of the paper's Table 1, and what it reports."""

    name: str
    model: str
    ttft_s: float
    tpot_s: float
    prompt: tuple[float, float]  # median and 90 % point, tokens
    output: tuple[float, float]
    prefill_tp: int
    decode_tp: int
    vllm_tp: int
    published: tuple[float, float]  # range of goodput over vLLM's


WORKLOADS = (
    Workload("ShareGPT, OPT-13B", "opt-13b", 0.25, 0.1, (560, 1500), (150, 400), 2, 1, 1, (2.0, 4.6)),
    Workload("ShareGPT, OPT-66B", "opt-66b", 0.4, 0.1, (560, 1500), (150, 400), 4, 4, 4, (2.0, 4.6)),
    Workload("HumanEval, OPT-66B", "opt-66b", 0.125, 0.2, (155, 270), (80, 190), 4, 4, 4, (5.7, 5.7)),
    Workload("LongBench, OPT-66B", "opt-66b", 15.0, 0.15, (1760, 1960), (70, 180), 4, 4, 4, (4.3, 4.3)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """An engine's steps for OPT-13B on one A100, as DistServe's artifact gives them, in ms."""

    prefill: tuple[float, float, float]  # constant, per token, per squared token of a prompt
    decode: tuple[float, float, float]  # constant, per token of context, per sequence

    def factors(self) -> tuple[float, float]:
        """(prefill, decode) time over our model's, at a mean prompt of ShareGPT and a batch of 16."""
        law = Engine("opt-13b", "a100").law()
        tokens, rows, context = 755, 16, 16 * 800
        prefill_s = 1e-3 * (self.prefill[0] + self.prefill[1] * tokens + self.prefill[2] * tokens**2)
        decode_s = 1e-3 * (self.decode[0] + self.decode[1] * context + self.decode[2] * rows)
        return (
            prefill_s / law.predict(StepShape().plus(0, tokens)).seconds,
            decode_s / law.predict(StepShape(rows, rows, context, 0)).seconds,
        )


DISTSERVE = Measured((18.10, 0.1019, 7.12e-6), (19.93, 6.27e-4, 0.0385))
VLLM = Measured((22.05, 0.1405, 8.1e-6), (23.48, 5.93e-4, 0.0607))


class Scaled:
    """A cost model whose steps with prompts and whose other steps take so many times as long."""

    ready = True

    def __init__(self, law: CostModel, prefill: float, decode: float) -> None:
        self._law, self._prefill, self._decode = law, prefill, decode

    def predict(self, shape: StepShape) -> Estimate:
        """The law's answer, scaled."""
        found = self._law.predict(shape)
        factor = self._prefill if shape.pairs else self._decode
        return Estimate(found.seconds * factor, found.low * factor, found.high * factor)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """It does not learn."""

    def errors(self) -> tuple[float, float]:
        """Not kept."""
        return 0.0, 0.0


def lengths(workload: Workload, count: int, seed: int) -> list[Length]:
    """Pairs within OPT's context of 2,048."""
    rng = random.Random(f"{seed}:{workload.name}")
    pairs = []
    for _ in range(count):
        prompt = lognormal(*workload.prompt, rng, low=4, high=1984)
        pairs.append((prompt, lognormal(*workload.output, rng, high=2048 - prompt)))
    return pairs


def engine(workload: Workload, tp: int, factors: tuple[float, float]) -> Engine:
    """vLLM of 2023: whole prompts before everybody's next token. Steps so many times as long as our model's."""
    made = Engine(
        workload.model, "a100", tp=tp, policy="prefill_first", options=(("chunk", 0),), max_model_len=2048, budget=4096
    )
    return replace(made, cost=Scaled(made.law(), *factors))


def colocated(workload: Workload, factors: tuple[float, float]) -> tuple[list[tuple[str, Blueprint]], int]:
    """The baseline and its GPUs."""
    return [("v0", engine(workload, workload.vllm_tp, factors).blueprint())], workload.vllm_tp


def disaggregated(
    workload: Workload, factors: tuple[float, float], network: LinkSpec = NVLINK
) -> tuple[list[tuple[str, Blueprint]], int]:
    """One prefill engine and one decode engine, and their GPUs."""
    prefill = engine(workload, workload.prefill_tp, factors).blueprint(role=Role.PREFILL, network=network)
    decode = engine(workload, workload.decode_tp, factors).blueprint(role=Role.DECODE, network=network)
    return [("p0", prefill), ("d0", decode)], workload.prefill_tp + workload.decode_tp


def goodput(
    members: list[tuple[str, Blueprint]], gpus: int, workload: Workload, count: int, seed: int, tolerance: float
) -> float:
    """Highest rate per GPU with enough requests in time; layers of KV leave while the prompt is computed."""
    pairs = lengths(workload, count, seed)

    def holds(rate: float) -> bool:
        arrivals = requests(poisson(rate * gpus, count, seed), pairs)
        run = serve(members, arrivals, overlap_layers=40)
        return run.goodput(ttft_s=workload.ttft_s, tpot_s=workload.tpot_s) >= ATTAINMENT

    return highest(holds, 0.5, tolerance=tolerance)


def compare(
    paper: Paper, workload: Workload, speeds: tuple[tuple[float, float], ...], count: int, seed: int, tolerance: float
) -> None:
    """Both placements, the baseline at each speed; the first is DistServe's own."""
    apart = goodput(*disaggregated(workload, speeds[0]), workload, count, seed, tolerance)
    gpus = f"{workload.prefill_tp}+{workload.decode_tp} GPUs"
    paper.row(f"{workload.name}: apart ({gpus})", None, apart, "req/s/GPU")
    low, high = workload.published
    published = f"{low:g}x" if low == high else f"{low:g}x to {high:g}x"
    gains = []
    for label, factors in zip(("as fast", "as measured", "slower still"), speeds, strict=True):
        alone = goodput(*colocated(workload, factors), workload, count, seed, tolerance)
        gains.append(apart / alone if alone else float("inf"))
        paper.row(f"{workload.name}: vLLM {label} ({workload.vllm_tp} GPUs)", None, alone, "req/s/GPU")
        checked = gains[-1] > 1.0 if label == "as measured" else None
        gain = f"{gains[-1]:.2f}x" if alone else "vLLM: none"  # no rate at which nine in ten are in time
        paper.row(f"{workload.name}: gain, vLLM {label}", published, gain, holds=checked)
    bracketed = gains[0] / ORDER <= low and high <= gains[-1] * ORDER
    paper.row(f"{workload.name}: reported gain in this range", "yes", "yes" if bracketed else "no", holds=bracketed)


def main() -> int:
    args = arguments(__doc__)
    paper = Paper("Goodput of disaggregation, per workload", "DistServe, OSDI'24, and its artifact's plots", args)
    count, tolerance = (120, 0.10) if args.quick else (600, 0.03)
    paper.setting("goodput", f"highest Poisson rate per GPU at which {ATTAINMENT:.0%} meet TTFT and TPOT")
    paper.setting("ours", f"{count} requests a probe; A100 80 GB SXM; link {NVLINK.bytes_per_s / 1e9:g} GB/s")
    fast, measured = DISTSERVE.factors(), VLLM.factors()
    slower = (1.25 * measured[0], 1.25 * measured[1])
    for name, factors in (("DistServe's engine", fast), ("vLLM of the paper", measured)):
        paper.setting(f"{name} over our steps", f"prefill {factors[0]:.2f}, decode {factors[1]:.2f}")
    for workload in WORKLOADS:
        compare(paper, workload, (fast, measured, slower), count, args.seed, tolerance)
    target = replace(WORKLOADS[0], ttft_s=0.2)
    rate = goodput(*disaggregated(target, fast), target, count, args.seed, tolerance)
    paper.row("the artifact's own simulator: OPT-13B, 200/100 ms, TP2 + TP1", 1.56, rate, "req/s/GPU")
    return paper.finish()


if __name__ == "__main__":
    sys.exit(main())
