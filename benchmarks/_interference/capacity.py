"""capacity: Poisson arrivals with the lengths of the conversation trace.

First every variant runs once at one common rate: of each preset the setting that is good for most is its best, and of
those the best is the best preset. Then the highest rate at which 95 % of requests are inside both their targets is
searched, to 10 %, for slo, the best preset and the vendors' defaults. Who has none down to a quarter of slo's is
compared by goodput at slo's.
"""

from __future__ import annotations

from typing import Any

from _interference.bench import START_S, Bench
from _interference.judge import HOLDS, best_of_each, highest, outcomes, share, steady_gaps
from _interference.judge import at as percentile_at
from _interference.loads import plan_of, play, rows_of, with_trace
from _interference.variants import SLO, Variant
from paceline.measure.plan import Load
from paceline.measure.slo import parse_slos

TRIALS = 16  # of a search, usually: what fails is asked twice
LEAST = 0.25  # of slo's capacity: below this a preset's is called none


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    found = {f"common {variant.name}": _about_s(bench, bench.common_rate) for variant in bench.variants}
    best = (bench.state.get("best at the common rate") or {}).get("name", "best preset")
    found |= {f"capacity {name}": TRIALS * (_about_s(bench, bench.common_rate) - START_S) for name in ("slo", best)}
    for variant in bench.variants:
        if variant.vendor_default and variant.name != best:
            found[f"capacity {variant.name}"] = 2 * bench.size.most_s + 2 * START_S
    return found


def measure(bench: Bench) -> None:
    """Choose, then search. Raises OutOfTime."""
    choose(bench)
    search(bench, SLO, start=bench.common_rate, floor=LEAST * bench.common_rate)
    ours = bench.state.get("capacity slo")["rate"]
    if not ours:
        return  # nothing to compare with
    for variant in bench.rivals():
        # A vendor's default is asked first whether it reaches half of what slo does.
        start = ours / 2 if variant.vendor_default else ours / 1.3
        search(bench, variant, start=start, floor=LEAST * ours)
        if not bench.state.get(f"capacity {variant.name}")["rate"]:
            _at_rate(bench, variant, ours, f"at slo's capacity {variant.name}")


def choose(bench: Bench) -> None:
    """Every variant at the common rate; keeps the best of each preset, and the best preset. Raises OutOfTime."""
    rate = bench.common_rate
    for variant in bench.variants:
        _at_rate(bench, variant, rate, f"common {variant.name}")
    found = {name: bench.state.get(f"common {name}") for name in (variant.name for variant in bench.variants)}
    each = best_of_each(found, {variant.name: variant.preset for variant in bench.variants})
    each.pop("slo", None)
    best = max(each.values(), key=lambda name: (found[name]["goodput"], -found[name]["itl_p99_s"]))
    bench.state.put("best at the common rate", {"name": best, "of each preset": each, "rate": rate})


def search(bench: Bench, variant: Variant, *, start: float, floor: float) -> None:
    """The capacity of one variant, with each trial kept. Raises OutOfTime."""
    key = f"capacity {variant.name}"
    if bench.state.get(key) is not None:
        return
    trials: list[dict[str, Any]] = []
    with bench.serving_if_asked(variant) as url:

        def holds(rate: float, attempt: int) -> bool:
            rate = float(f"{rate:.4g}")
            name = _trial(variant, rate, attempt)
            found = bench.measured(name, _about_s(bench, rate), lambda: _run(bench, url(), rate, name, attempt))
            trials.append({"rate": rate, "attempt": attempt, "goodput": found["goodput"]})
            return bool(found["goodput"] >= HOLDS)

        best = highest(holds, start, floor=floor)
    bench.state.put(key, {"rate": best and float(f"{best:.4g}"), "floor": floor, "trials": trials})


def tell(bench: Bench) -> None:
    """Rows, ratios and verdicts of what was measured."""
    report, state = bench.report, bench.state
    for variant in bench.variants:
        found = state.get(f"common {variant.name}")
        if found is not None:
            report.add(f"{variant.name}: goodput at {found['rate']:.3g}/s", [found["goodput"]], "share")
    best = state.get("best at the common rate")
    if best is not None:
        report.note("best preset at the common rate", best["name"])
        report.note("best setting of each preset", best["of each preset"])
    ours = state.get("capacity slo")
    for variant in (SLO, *bench.rivals()):
        found = state.get(f"capacity {variant.name}")
        if found is None:
            continue
        rate = found["rate"]
        report.note(f"capacity of {variant.name}", f"{rate:g}/s" if rate else f"none: {found['floor']:.3g}/s fails")
        if variant is SLO or not ours or not ours["rate"]:
            continue
        target = 2 if variant.vendor_default else 1.3
        if rate:
            report.add(f"slo's capacity / {variant.name}'s (target {target})", [ours["rate"] / rate], "x")
            continue
        theirs, at_ours = state.get(f"at slo's capacity {variant.name}"), state.get(_trial(SLO, ours["rate"], 0))
        if theirs and at_ours:
            report.add(f"{variant.name}: goodput at slo's capacity", [theirs["goodput"]], "share")
            report.add("slo: goodput at slo's capacity", [at_ours["goodput"]], "share")


def _trial(variant: Variant, rate: float, attempt: int) -> str:
    return f"capacity {variant.name} {rate:g} {attempt}"


def _about_s(bench: Bench, rate: float) -> float:
    return START_S + _requests(bench, rate) / rate + 5.0


def _requests(bench: Bench, rate: float) -> int:
    """A full run, cut where it would take too long, but not below what can tell 95 %."""
    size = bench.size
    return round(min(size.requests, max(size.least_requests, size.most_s * rate)))


def _at_rate(bench: Bench, variant: Variant, rate: float, key: str) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        with bench.serving(variant) as url:
            return _run(bench, url, rate, key, 0)

    found: dict[str, Any] = bench.measured(key, _about_s(bench, rate), work)
    return found


def _run(bench: Bench, url: str, rate: float, key: str, attempt: int) -> dict[str, Any]:
    """One run. Every variant and every rate sees the same lengths and, scaled, the same arrivals of that attempt."""
    scenario = bench.scenario
    load = Load(rate=rate, requests=_requests(bench, rate))
    plan = plan_of(url, load, key, slos=scenario.slos, seed=attempt)
    plan = with_trace(plan, bench.state.folder / "lengths.jsonl", rows_of(bench.lengths))
    played = play(plan, bench.state.scratch(key))
    end_s = max(record.closed_s or 0.0 for record in played.records)
    return {
        "rate": rate,
        "goodput": share(outcomes(played.records, parse_slos(scenario.slos))),
        "itl_p99_s": percentile_at(steady_gaps(played.records, 0.0, end_s), 99),
        "failed": sum(not record.ok for record in played.records),
    }
