"""How much of disaggregation's gain a slow link eats.

    python benchmarks/papers/slow_link.py [--quick] [--json FILE]

Prefill and decode apart pays in goodput as long as the KV travels in no time. Users who tried it over ordinary networks
report that 30 to 50 % of the gain is lost; DistServe places both phases on one node because its nodes are joined by
25 Gbit/s; Splitwise sees 0.8 % of a request's time on 200 GB/s. Here: the goodput per GPU of DistServe's summarisation
set-up (LongBench, OPT-66B: 2.3 MiB of KV a token, 4 GB a prompt; TTFT 15 s, TPOT 0.15 s) by the link between the two
engines, with the KV sent after the prompt is done, and layer by layer beside it. Of the gain over one colocated engine
(vLLM as measured, see distserve.py), the share that is gone.
"""

from __future__ import annotations

import sys

from _paper import Length, Paper, arguments, highest, poisson, requests, serve
from distserve import ATTAINMENT, DISTSERVE, NVLINK, VLLM, WORKLOADS, colocated, disaggregated, goodput, lengths

from paceline.cost.catalogue import find_model
from paceline.simulate.fleet.link import LinkSpec

# Usable in one direction: nine tenths of what is printed on the card.
LINKS = (
    ("400 Gbit/s", LinkSpec(45e9, 1e-4)),
    ("200 Gbit/s", LinkSpec(22e9, 1e-4)),
    ("100 Gbit/s", LinkSpec(11e9, 1e-4)),
    ("25 Gbit/s", LinkSpec(2.8e9, 5e-4)),
)
WORKLOAD, LAYERS = WORKLOADS[3], 64


def rate_over(link: LinkSpec, layers: int | None, pairs: list[Length], seed: int, tolerance: float) -> float:
    """Goodput per GPU with the two engines joined by this link."""
    members, gpus = disaggregated(WORKLOAD, DISTSERVE, link)

    def holds(rate: float) -> bool:
        arrivals = requests(poisson(rate * gpus, len(pairs), seed), pairs)
        run = serve(members, arrivals, overlap_layers=layers)
        return run.goodput(ttft_s=WORKLOAD.ttft_s, tpot_s=WORKLOAD.tpot_s) >= ATTAINMENT

    return highest(holds, 1.0, tolerance=tolerance)


def main() -> int:
    args = arguments(__doc__)
    count, tolerance, halvings = (120, 0.10, 2) if args.quick else (500, 0.03, 5)
    paper = Paper(
        "Disaggregation over a slow link", "Reports of 30 to 50 % of the gain lost; DistServe's testbed", args
    )
    paper.setting("set-up", f"{WORKLOAD.name}; {count} requests a probe; prefill TP4, decode TP4, A100 80 GB")
    pairs = lengths(WORKLOAD, count, args.seed)
    kv_bytes = sum(prompt for prompt, _ in pairs) / count * find_model(WORKLOAD.model).kv_bytes_per_token("bf16")
    paper.setting("KV of a mean prompt", f"{kv_bytes / 1e9:.1f} GB")
    alone = goodput(*colocated(WORKLOAD, VLLM), WORKLOAD, count, args.seed, tolerance)
    best = rate_over(NVLINK, LAYERS, pairs, args.seed, tolerance)
    paper.row("one engine for both", None, alone, "req/s/GPU")
    paper.row("apart, NVLink", None, best, "req/s/GPU")

    def gone(rate: float) -> float:
        return min(1.0, max(0.0, (best - rate) / (best - alone)))

    lost = []
    for name, link in LINKS:
        for way, layers in (("after the prompt", None), ("layer by layer", LAYERS)):
            rate = rate_over(link, layers, pairs, args.seed, tolerance)
            paper.row(f"{name}, {way}", None, rate, "req/s/GPU")
            paper.row(f"{name}, {way}: of the gain, gone", None, f"{gone(rate):.0%}")
            if layers is None:
                lost.append(gone(rate))
    paper.row(
        "the slower the link, the less is left",
        "yes",
        "yes" if lost == sorted(lost) else "no",
        holds=lost == sorted(lost),
    )
    low = next((link for (_, link), share in zip(LINKS, lost, strict=True) if share > 0.4), LINKS[-1][1]).bytes_per_s
    high = 2.0 * low
    for _ in range(halvings):
        middle = (low + high) / 2.0
        share = gone(rate_over(LinkSpec(middle, 1e-4), None, pairs, args.seed, tolerance))
        low, high = (middle, high) if share > 0.4 else (low, middle)
    eaten = gone(rate_over(LinkSpec(low, 1e-4), None, pairs, args.seed, tolerance))
    left = gone(rate_over(LinkSpec(high, 1e-4), None, pairs, args.seed, tolerance))
    paper.row(f"of the gain, gone at {8e-9 * low:.0f} Gbit/s", "30 to 50 %", f"{eaten:.0%}")
    paper.row(
        f"of the gain, gone at {8e-9 * high:.0f} Gbit/s",
        "30 to 50 %",
        f"{left:.0%}",
        holds=left <= 0.5 and eaten >= 0.3,
    )
    paper.note(
        f"A link eats nothing until its queue grows: at {best:.2f} req/s/GPU the pair sends "
        f"{best * 8 * kv_bytes / 1e9:.0f} GB/s of KV. Below that goodput is capped near bandwidth / KV bytes, and "
        "sending layers early does not help, because the wire and not the order is what is short. 30 to 50 % is a link "
        "somewhat below that, and a little further nearly all is gone. A model with an eighth of the KV a token "
        "(grouped queries) needs an eighth of the link."
    )
    return paper.finish()


if __name__ == "__main__":
    sys.exit(main())
