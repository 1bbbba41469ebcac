"""How many prompt tokens a step needs before a GPU is busy: Llama-13B on an RTX A6000.

    python benchmarks/papers/prefill_returns.py [--quick] [--json FILE]

SARATHI (arXiv 2308.16369) measures that the prefill throughput of LLaMA-13B on an A6000 stops growing at about 512
tokens, which is why a chunk of about that size costs little and saves decodes from long stalls. The same curve from our
cost model: tokens per second of one prefill by its length, and where it bends.
"""

from __future__ import annotations

import sys

from _paper import Engine, Paper, arguments

from paceline.core.shape import StepShape
from paceline.cost.catalogue import find_chip

PARAMS = 13.0e9
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NEARLY = 0.90  # of the highest throughput: what we call no longer growing


def main() -> int:
    args = arguments(__doc__)
    paper = Paper(
        "Diminishing returns of prefill tokens", "SARATHI, arXiv 2308.16369, LLaMA-13B on one RTX A6000", args
    )
    law = Engine("llama-2-13b", "a6000").law()
    paper.setting("model", "Llama-2-13B, BF16, one prompt alone in a step")
    rate = {n: n / law.predict(StepShape().plus(0, n)).seconds for n in LENGTHS}
    best = max(rate.values())
    for length, value in rate.items():
        paper.row(f"prefill of {length} tokens", None, round(value), "tokens/s")
    knee = min(length for length, value in rate.items() if value >= NEARLY * best)
    paper.row(
        f"shortest prefill within {1 - NEARLY:.0%} of the best",
        512,
        knee,
        "tokens",
        holds=256 <= knee <= 1024,
        why="the paper says 'about 512'; a factor of two either way is one step of our lengths",
    )
    gain = {length: rate[2 * length] / rate[length] for length in LENGTHS[:-1]}
    paper.row("gain of doubling 64 tokens", "~2", gain[64], "x", holds=gain[64] > 1.6)
    paper.row("gain of doubling 512 tokens", "~1", gain[512], "x", holds=gain[512] < 1.15)
    shares = {length: 2.0 * PARAMS * rate[length] / find_chip("a6000").flops("bf16") for length in (64, 512)}
    paper.note(
        f"64 tokens use {shares[64]:.0%} of the chip's arithmetic, because the weights are read for them alone; 512 "
        f"use {shares[512]:.0%}. The chip's ratio is {find_chip('a6000').critical_batch():.0f} tokens."
    )
    return paper.finish()


if __name__ == "__main__":
    sys.exit(main())
