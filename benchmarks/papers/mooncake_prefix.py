"""The Mooncake conversation trace: how much of its prompts was seen before, and what a router makes of it.

    python benchmarks/papers/mooncake_prefix.py [--quick] [--json FILE]

Two things. With a cache that never forgets, the share of 512-token prefix blocks that hit is a property of the trace
alone: 36.6 % (FAST'25 release; NVIDIA's Dynamo documentation prints 36.64 %). And real caches forget and are many:
prefix-aware routing against round robin on the same replicas, in virtual time, with the memory that one H100 leaves
for KV. No numbers of this comparison are published for the trace ("> 20x TTFT" for another, by AKS; "2x TTFT, 1.6x
throughput" by Baseten); the direction is. Refused requests are counted beside the latency, because a router can buy one
with the other: nobody is refused here.
"""

from __future__ import annotations

import argparse
import sys

from _paper import DATA, Engine, Paper, arguments, mean, quantile

from paceline.measure.plan import Arrivals, BenchPlan, Load, Target, Trace
from paceline.measure.traces import TraceRow, load_trace
from paceline.route.policies.holdings import Holdings
from paceline.route.policies.registry import make_router
from paceline.simulate.fleet.fleet import Fleet
from paceline.simulate.fleet.report import FleetRun
from paceline.simulate.traffic import planned

TRACE = DATA / "mooncake_conversation.jsonl"
PUBLISHED_HIT = 0.366
ENGINE = Engine(
    "llama-3-8b",
    "h100",
    budget=8192,
    block_size=64,
    max_model_len=131_072,
    prefix_caching=True,
)


def infinite_hit(rows: list[TraceRow]) -> float:
    """Share of prompt blocks whose whole prefix came before, in a cache that holds everything."""
    cache, hits, blocks = Holdings(), 0, 0
    for row in rows:
        hits += cache.match(row.blocks)
        blocks += len(row.blocks)
        cache.add(row.blocks)
    return hits / blocks


def routed(router: str, replicas: int, limit: int, speed: float, seed: int) -> FleetRun:
    """The first `limit` requests of the trace, `speed` times as fast, on a fleet behind this router."""
    plan = BenchPlan(
        target=Target(url="simulated:"),
        load=Load(arrivals=Arrivals.TRACE),
        trace=Trace(path=str(TRACE), limit=limit, speed=speed),
        seed=seed,
    )
    blueprint = ENGINE.blueprint()
    members = [(f"r{number}", blueprint) for number in range(replicas)]
    return Fleet(members, router=make_router(router), seed=seed).run(planned(plan))


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--replicas", type=int, default=8)
        parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast as the trace")

    args = arguments(__doc__, add)
    paper = Paper("Prefix blocks of the Mooncake conversation trace", "Mooncake, FAST'25, and its released trace", args)
    if not TRACE.exists():
        print(f"  skipped: {TRACE} is not there")
        return 0
    rows = load_trace(Trace(path=str(TRACE)))
    limit = 400 if args.quick else 4000
    paper.setting(
        "trace", f"{len(rows)} requests, {sum(row.input_tokens or 0 for row in rows) / len(rows):.0f} tokens in"
    )
    paper.setting("fleet", f"{args.replicas} x {ENGINE.model} on {ENGINE.chip}, the trace's first {limit} requests")
    paper.setting("blocks of KV", f"{ENGINE.blueprint().config.num_blocks} of {ENGINE.block_size} tokens a replica")
    hit = infinite_hit(rows)
    paper.row("prefix-block hit, infinite cache", PUBLISHED_HIT, round(hit, 3), holds=round(hit, 3) == PUBLISHED_HIT)
    runs = {}
    for router in ("round_robin", "least_load", "sticky", "prefix_aware"):
        run = runs[router] = routed(router, args.replicas, limit, args.speed, args.seed)
        ttft = [journey.ttft_s or 0.0 for journey in run.done]
        paper.row(f"{router}: prompt tokens from the cache", None, run.hit_share)
        paper.row(f"{router}: TTFT mean", None, mean(ttft), "s")
        paper.row(f"{router}: TTFT p90", None, quantile(ttft, 0.9), "s")
        paper.row(f"{router}: refused or failed", None, float(run.arrived - len(run.done)))
    blind, aware = runs["round_robin"], runs["prefix_aware"]
    gain = mean(j.ttft_s or 0.0 for j in blind.done) / mean(j.ttft_s or 0.0 for j in aware.done)
    paper.row(
        "cache hits, prefix-aware over round robin",
        "more",
        aware.hit_share / blind.hit_share,
        "x",
        holds=aware.hit_share > blind.hit_share,
    )
    paper.row("mean TTFT, round robin over prefix-aware", "> 1", gain, "x", holds=gain > 1.0)
    within = infinite_hit(rows[:limit])
    paper.note(
        f"These {limit} requests would hit {within:.1%} of their blocks in an infinite cache; prefix-aware routing "
        f"gets {aware.hit_share:.1%} of the tokens, round robin {blind.hit_share:.1%}."
    )
    return paper.finish()


if __name__ == "__main__":
    sys.exit(main())
