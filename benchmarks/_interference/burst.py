"""burst: half of slo's capacity, then four times it for ten seconds, then half again.

Goodput is that of the burst's own requests, by scheduled time. A request refused by 429 is not good, and not lost; one
that was dropped or failed is both. How long until attainment is back is `judge.recovery_s`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from _interference.bench import START_S, Bench
from _interference.judge import attainment, lost, outcomes, recovery_s, share
from _interference.loads import plan_of, play, poisson, with_trace
from _interference.variants import SLO, Variant
from paceline.measure.plan import Arrivals, Load
from paceline.measure.slo import parse_slos

CALM, BURST = 0.5, 4.0  # of slo's capacity


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    size = bench.size
    about_s = START_S + size.calm_s + size.burst_s + size.after_s + 10.0
    return {f"burst {variant.name}": about_s for variant in (SLO, *bench.rivals())}


def measure(bench: Bench) -> None:
    """One run each. Raises OutOfTime."""
    about = planned(bench)
    for variant in (SLO, *bench.rivals()):
        key = f"burst {variant.name}"
        bench.measured(key, about[key], partial(_run, bench, variant, key))


def tell(bench: Bench) -> None:
    """Rows, ratios and verdicts of what was measured."""
    report = bench.report
    ours = bench.state.get("burst slo")
    if ours is not None:
        report.note("burst: full load", f"{ours['full_load']['rate']:.3g}/s, {ours['full_load']['is']}")
    for variant in (SLO, *bench.rivals()):
        found = bench.state.get(f"burst {variant.name}")
        if found is None:
            continue
        name, back_s = variant.name, found["recovery_s"]
        report.add(f"{name}: goodput of the burst's {found['burst_requests']} requests", [found["goodput"]], "share")
        report.note(
            f"{name}: attainment back after the burst", "not in this run" if back_s is None else f"{back_s:.1f} s"
        )
        report.note(f"{name}: requests lost", found["lost"])
        if variant is not SLO and ours and found["goodput"]:
            report.add(f"slo's goodput in the burst / {name}'s (target 1.5)", [ours["goodput"] / found["goodput"]], "x")
        elif variant is not SLO and ours:
            report.note(f"slo's goodput in the burst / {name}'s", "no ratio: its goodput is 0")


def _run(bench: Bench, variant: Variant, key: str) -> dict[str, Any]:
    size, rate = bench.size, bench.full_rate
    begins_s, ends_s = size.calm_s, size.calm_s + size.burst_s
    times = [
        *poisson(CALM * rate, 0.0, begins_s, "calm"),
        *poisson(BURST * rate, begins_s, ends_s, "burst"),
        *poisson(CALM * rate, ends_s, ends_s + size.after_s, "after"),
    ]
    rows = [
        {"at_s": at_s, "input_tokens": tokens_in, "output_tokens": tokens_out}
        for at_s, (tokens_in, tokens_out) in zip(times, bench.lengths, strict=False)
    ]
    # A trace begins at its first arrival.
    begins_s, ends_s = begins_s - times[0], ends_s - times[0]
    slos = parse_slos(bench.scenario.slos)
    with bench.serving(variant) as url:
        plan = plan_of(url, Load(arrivals=Arrivals.TRACE), key, slos=bench.scenario.slos)
        played = play(with_trace(plan, bench.state.folder / "burst.jsonl", rows), bench.state.scratch(key))
    found = outcomes(played.records, slos)
    of_burst = [(at_s, good) for at_s, good in found if begins_s <= at_s < ends_s]
    return {
        "full_load": bench.full_load,
        "begins_s": begins_s,
        "ends_s": ends_s,
        "goodput": share(of_burst),
        "burst_requests": len(of_burst),
        "goodput_of_all": share(found),
        "recovery_s": recovery_s(found, ends_s, size.window),
        "attainment": attainment(found, size.window),
        "lost": lost(played.records),
        "sent": len(found),
    }
