"""interference: eight steady streams while long prompts arrive.

First each variant runs once; of the presets whose streams hold their p99, the one whose newcomers come first is the
best preset. It and slo are then measured again in turns, and so are the vendors' defaults: those runs, which chose
nothing, are what is told.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from _interference.bench import START_S, Bench
from _interference.judge import at, best_inside, first_tokens, nearest, steady_gaps, streams_row
from _interference.loads import UNTIL_STOPPED_S, plan_of, play, play_beside, streams, with_trace
from _interference.scenario import STREAM_IN, STREAMS, Scenario
from _interference.variants import BY_NAME, SLO, VARIANTS, Variant
from paceline.measure.plan import Arrivals, Load

ALONE = 4  # long prompts, one after another; the first warms up


def measure_scenario(bench: Bench) -> Scenario:
    """The machine alone: one long prompt after another, then eight streams with nothing beside them."""

    def work() -> dict[str, float]:
        size = bench.size
        with bench.serving(BY_NAME["vllm"], {}) as url:
            load = Load(arrivals=Arrivals.CLOSED, concurrency=1, requests=ALONE)
            prompts = streams(url, "alone", tokens_in=size.long_in, tokens_out=2, count=1, duration_s=1.0)
            alone = play(msgspec.structs.replace(prompts, load=load), bench.state.scratch("alone"))
            few = streams(url, "few", tokens_in=STREAM_IN, tokens_out=size.stream_out, count=STREAMS, duration_s=0.5)
            calm = play(few, bench.state.scratch("calm"))
        end_s = max(record.closed_s or 0.0 for record in calm.records)
        return {
            "prefill_s": at(first_tokens(alone.records)[1:], 50),
            "gap_s": at(steady_gaps(calm.records, 1.0, end_s), 50),
            "long_in": size.long_in,
        }

    return Scenario(**bench.measured("scenario", 30.0, work))


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    found = {f"sweep {variant.name}": _about_s(bench, bench.size.sweep_newcomers) for variant in bench.variants}
    names = ["slo", "best preset", *(variant.name for variant in bench.variants if variant.vendor_default)]
    chosen = (bench.state.get("best in interference") or {}).get("name") or "best preset"
    for turn in range(bench.size.rounds):
        for name in names:
            found[_key(turn, chosen if name == "best preset" else name)] = _about_s(bench, bench.size.newcomers)
    return found


def measure(bench: Bench) -> None:
    """Sweep, choose, then take turns. Raises OutOfTime."""
    size = bench.size
    results = {
        variant.name: bench.measured(
            f"sweep {variant.name}",
            _about_s(bench, size.sweep_newcomers),
            partial(_run, bench, variant, f"sweep {variant.name}", size.sweep_newcomers),
        )
        for variant in bench.variants
    }
    inside = best_inside(results, bench.scenario.itl_s)
    best = bench.state.put("best in interference", {"name": inside or nearest(results), "inside": inside is not None})
    pair = (SLO, BY_NAME[best["name"]])
    defaults = [v for v in bench.variants if v.vendor_default and v not in pair]
    for group in (pair, defaults):
        for turn in range(size.rounds):
            for variant in group:
                key = _key(turn, variant.name)
                bench.measured(
                    key,
                    _about_s(bench, size.newcomers),
                    partial(_run, bench, variant, key, size.newcomers),
                )


def tell(bench: Bench) -> None:
    """Rows, ratios and verdicts of what was measured."""
    report, scenario = bench.report, bench.scenario
    for variant in bench.variants:
        found = bench.state.get(f"sweep {variant.name}")
        if found is not None:
            report.add(f"once: {variant.name}: p99 ITL / target", [found["itl_p99_s"] / scenario.itl_s], "x")
            report.add(f"once: {variant.name}: p95 TTFT / prefill", [found["ttft_p95_s"] / scenario.prefill_s], "x")
            if found["grows"]:
                report.note(f"once: {variant.name}", "the queue of newcomers grows without end")
    rounds = {variant.name: told_rounds(bench, variant.name) for variant in VARIANTS}
    for name, rows in rounds.items():
        if rows:
            report.add(f"{name}: p99 ITL of the streams / target", [r["itl_p99_s"] / scenario.itl_s for r in rows], "x")
            report.add(f"{name}: p95 TTFT / prefill alone", [r["ttft_p95_s"] / scenario.prefill_s for r in rows], "x")
    _judge(bench, rounds)


def told_rounds(bench: Bench, name: str) -> list[dict[str, Any]]:
    """The runs of one variant that were measured in turns."""
    return list(bench.known(_key(turn, name) for turn in range(bench.size.rounds)).values())


def _judge(bench: Bench, rounds: dict[str, list[dict[str, Any]]]) -> None:
    report, itl_s = bench.report, bench.scenario.itl_s
    ours = rounds["slo"]
    best = bench.state.get("best in interference")
    if not ours or best is None:
        return
    if any(row["grows"] for row in ours):
        report.note("interference", "INVALID: slo's queue of newcomers grows without end; this load is no steady one")
    held = sum(row["itl_p99_s"] <= itl_s for row in ours)
    report.note("slo holds p99 ITL", f"in {held} of {len(ours)} runs: {'yes' if held == len(ours) else 'NO'}")
    name = best["name"]
    inside = "inside the target" if best["inside"] else "NOT inside the target, nobody was; the nearest"
    report.note("best preset", f"{name}, {inside}")
    pairs = list(zip(rounds[name], ours, strict=False))
    if pairs:
        worse = [theirs["ttft_p95_s"] / our["ttft_p95_s"] for theirs, our in pairs]
        report.add("best preset's p95 TTFT / slo's (target 1.5)", worse, "x")
        held = sum(theirs["itl_p99_s"] <= itl_s for theirs, _ in pairs)
        report.note("best preset holds p99 ITL", f"in {held} of {len(pairs)} runs")


def _key(turn: int, name: str) -> str:
    return f"turn {turn} {name}"


def _about_s(bench: Bench, newcomers: int) -> float:
    return START_S + 3.0 + newcomers * bench.scenario.period_s + bench.scenario.ttft_s


def _run(bench: Bench, variant: Variant, key: str, newcomers: int) -> dict[str, Any]:
    size, period_s = bench.size, bench.scenario.period_s
    row = {"input_tokens": size.long_in, "output_tokens": size.long_out}
    rows = [{"at_s": period_s * number, **row} for number in range(newcomers)]
    with bench.serving(variant) as url:
        steady = streams(
            url,
            f"{key}:streams",
            tokens_in=STREAM_IN,
            tokens_out=size.stream_out,
            count=STREAMS,
            duration_s=UNTIL_STOPPED_S,
        )
        plan = plan_of(url, Load(arrivals=Arrivals.TRACE), f"{key}:newcomers")
        # Requests that warm up would disturb the streams before anything is measured, longest where they take longest.
        plan = msgspec.structs.replace(plan, client=msgspec.structs.replace(plan.client, warmup_requests=0))
        plan = with_trace(plan, bench.state.folder / "newcomers.jsonl", rows)
        came, streamed = play_beside(plan, bench.state.scratch(key), steady, bench.state.scratch(f"{key} streams"))
    return streams_row(streamed.records, came.records, period_s, came.zero_s - streamed.zero_s)
