"""Three vendors' defaults against `slo`: time to first token against time between tokens, over rates.

    python benchmarks/frontier.py [--quick] [--json FILE] [--png FILE] [--trace AZURE_CSV]

Simulated: Llama-3-8B in bf16 on one H100, from its datasheet, under the Azure conversation trace of 2023, whose
arrivals are played faster and faster; the real scheduler decides every step. The vendors' policies run as they come
(`decode_first` 2,048 tokens a step, `prefill_first` chunks of 8,192, `no_evict` whole prompts up to 8,192 tokens).
`slo` is told a promise: TTFT 1 s and ITL 100 ms, which is the built-in class `interactive`, and a second time ITL
50 ms. Its token budget is 8,192 too; it seldom uses it.

The trace tells how long answers were, not what clients asked for: `max_tokens` is the answer's length, which is the
best case for `no_evict`. Times are from a request's place on the schedule to the client's read; 16 ms a request go into
HTTP and tokenising (see docs/simulate.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import Report, arguments

from paceline.core.classes import INTERACTIVE, TrafficClass
from paceline.core.config import SchedulerConfig
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.measure.plan import Arrivals, BenchPlan, Load, Target, Trace
from paceline.measure.schedule import build_schedule
from paceline.measure.slo import parse_slos
from paceline.measure.summary import RunMetrics, measure_run
from paceline.simulate.overheads import Overheads
from paceline.simulate.run import EngineSetup, simulate_only

TRACE = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "azure_conv_2023.csv"
STRICT = TrafficClass("interactive", priority=0, ttft_s=1.0, itl_s=0.05, weight=2.0)
ATTAINMENT = 0.95  # of requests that keep both promises: below it a rate does not count as held


@dataclass(frozen=True)
class Arm:
    """One policy as it is run."""

    label: str
    policy: str
    kind: TrafficClass = INTERACTIVE
    budget: int = 2048


ARMS = (
    Arm("decode_first (vLLM)", "decode_first"),
    Arm("prefill_first (SGLang)", "prefill_first"),
    Arm("no_evict (TensorRT-LLM)", "no_evict"),
    Arm("slo, ITL 100 ms", "slo", budget=8192),
    Arm("slo, ITL 50 ms", "slo", STRICT, budget=8192),
)
VENDORS = 3


@dataclass(frozen=True)
class Point:
    """One arm at one rate. Latencies in seconds."""

    rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p99_s: float
    kept_100ms: float  # share of requests: TTFT within 1 s and p95 of its gaps within 100 ms
    kept_50ms: float
    output_per_s: float
    utilisation: float
    ended: str


def run(arm: Arm, plan: BenchPlan, rate: float) -> Point:
    """Simulate and measure."""
    deployment = Deployment(find_model("llama-3-8b"), find_chip("h100"))
    cost = AnalyticCost(deployment)
    config = SchedulerConfig(
        num_blocks=deployment.num_blocks(),
        max_model_len=16384,
        policy=arm.policy,
        max_num_batched_tokens=arm.budget,
        classes=(arm.kind,),
    )
    overheads = Overheads(before_s=cost.request_s)
    setup = EngineSetup(config, cost, overheads=overheads, default_class=arm.kind.name)
    result, _ = simulate_only(plan, setup)
    loose = measure_run(result.records, slos=parse_slos("ttft<=1s,itl_p95<=100ms"))
    tight = measure_run(result.records, slos=parse_slos("ttft<=1s,itl_p95<=50ms"))
    return Point(
        rate=rate,
        ttft_p50_s=_quantile(loose, "ttft", 50.0),
        ttft_p95_s=_quantile(loose, "ttft", 95.0),
        itl_p50_s=_quantile(loose, "itl", 50.0),
        itl_p99_s=_quantile(loose, "itl", 99.0),
        kept_100ms=loose.goodput.share or 0.0,
        kept_50ms=tight.goodput.share or 0.0,
        output_per_s=(loose.whole.output_tokens.per_s or 0.0) if loose.whole else 0.0,
        utilisation=result.usage["engine"].utilisation,
        ended=result.ended,
    )


def _quantile(run: RunMetrics, name: str, q: float) -> float:
    found = run.latencies[name].quantile(q)
    return float("nan") if found is None or found.value is None else found.value


def held(points: Sequence[Point], share: str) -> float:
    """The highest rate up to which every rate kept the promise; 0 if none did."""
    best = 0.0
    for point in sorted(points, key=lambda point: point.rate):
        if getattr(point, share) < ATTAINMENT:
            break
        best = point.rate
    return best


def draw(found: dict[str, list[Point]], path: Path) -> None:
    """The frontier, and who keeps the promise up to which rate."""
    import matplotlib as mpl  # pip install matplotlib

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.8), constrained_layout=True)
    for number, (label, points) in enumerate(found.items()):
        style = {"color": f"C{number}", "marker": "o" if number < VENDORS else "s", "linewidth": 1.8}
        style["linestyle"] = "--" if number < VENDORS else "-"
        ttft, itl = [point.ttft_p95_s for point in points], [1e3 * point.itl_p99_s for point in points]
        rates = [point.rate for point in points]
        left.plot(ttft, itl, label=label, **style)
        for point, x, y in zip(points, ttft, itl, strict=True):
            left.annotate(f"{point.rate:.0f}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        middle.plot(rates, [100 * point.kept_100ms for point in points], **style)
        right.plot(rates, [100 * point.kept_50ms for point in points], **style)
    left.set(xscale="log", yscale="log", xlabel="TTFT p95, s", ylabel="ITL p99, ms", title="Newcomers against readers")
    left.axvline(1.0, color="grey", linewidth=0.8)
    for bound in (50.0, 100.0):
        left.axhline(bound, color="grey", linewidth=0.8)
    for axes, bound in ((middle, 100), (right, 50)):
        axes.axhline(100 * ATTAINMENT, color="grey", linewidth=0.8)
        axes.set(xlabel="requests per second", ylabel="% of requests", ylim=(0, 102))
        axes.set_title(f"TTFT within 1 s and p95 of gaps within {bound} ms")
    left.legend(fontsize=8)
    figure.suptitle("Llama-3-8B on one H100, Azure conversation trace at rising speed (simulated; labels: requests/s)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, default=TRACE, help="Azure LLM inference trace 2023, conversation")
    parser.add_argument("--png", type=Path, help="draw the figure here")


def main() -> None:
    args = arguments(__doc__, add_options)
    if not args.trace.is_file():
        raise SystemExit(f"{args.trace} is not here; give --trace")
    report = Report("frontier", args)
    requests = 400 if args.quick else 1500
    natural = plan_of(args.trace, requests, 1.0)
    rate = natural_rate(natural)
    rates = (4, 10, 16) if args.quick else (2, 6, 10, 12, 14, 16, 18, 20, 22)
    found: dict[str, list[Point]] = {}
    for arm in ARMS:
        found[arm.label] = [run(arm, plan_of(args.trace, requests, wanted / rate), float(wanted)) for wanted in rates]
        for point in found[arm.label]:
            text = f"{arm.label}, {point.rate:g}/s"
            report.add(f"{text}: TTFT p95", [1e3 * point.ttft_p95_s], "ms")
            report.add(f"{text}: ITL p99", [1e3 * point.itl_p99_s], "ms")
            report.add(f"{text}: kept 1 s and 100 ms", [100 * point.kept_100ms], "%")
            report.add(f"{text}: kept 1 s and 50 ms", [100 * point.kept_50ms], "%")
    report.note("requests", requests)
    for label, points in found.items():
        report.note(f"{label}: rate held at 100 ms, at 50 ms", [held(points, "kept_100ms"), held(points, "kept_50ms")])
    report.finish()
    if args.png is not None:
        draw(found, args.png)
        print(f"figure: {args.png}")


def plan_of(trace: Path, requests: int, speed: float) -> BenchPlan:
    """The first requests of the trace, played at that speed."""
    return BenchPlan(
        target=Target(url="simulated:llama-3-8b"),
        load=Load(arrivals=Arrivals.TRACE),
        trace=Trace(path=str(trace), limit=requests, speed=speed),
    )


def natural_rate(plan: BenchPlan) -> float:
    """Requests per second of the trace as it was recorded."""
    schedule = build_schedule(plan)
    return (len(schedule) - 1) / (schedule[-1].at_s or 1.0)


if __name__ == "__main__":
    main()
