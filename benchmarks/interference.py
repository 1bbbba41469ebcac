"""What a long prompt does to everybody else's next token, under each policy: one runtime, one model, one machine.

    python benchmarks/interference.py [--quick | --smoke | --lean] [--part PART]... [--minutes M] [--out DIR]

interference  eight steady streams (32 in, 200 out) while a prompt of about 1,000 tokens (16 out) arrives every 2 times
              what prefilling it alone takes (measured first). itl_ms is 3 times the undisturbed gap of the streams.
              Figures: p99 of the streams' gaps, p95 of the newcomers' time to first token
capacity      Poisson arrivals with lengths of the Azure conversation trace divided by 8. Of each preset the best
              setting at one common rate; then the highest rate at which 95 % of requests are inside both targets, for
              slo, the best preset and the vendors' defaults
burst         4 times slo's capacity for 10 s: the share of the burst's requests inside both targets, how long until
              attainment is back, requests lost
tenants       two by API keys, one flooding: the other's p95 time to first token, against its value alone
batch         interactive traffic without and with an offline batch beside it
cost          how far the cost model is off in steady traffic

Every preset runs at its vendor's default and at settings that should suit it best: beating defaults proves little. A
server is started for each; `paceline bench`'s own code drives it. Results go to --out one by one, and what is there is
not measured again: an interrupted run is taken up by the same command. With --minutes nothing is begun that would end
later; with --lean presets have fewer settings, which takes two thirds of the time. Figures are written beside the
results. docs/interference.md defines every number.

--quick is slo and one preset in this process, without a server, in less than a minute; nothing is kept. --smoke goes
through every part in a few minutes, with sizes that prove nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from _common import Report, arguments
from _interference import batch, burst, capacity, cost, figures, streams, tenants
from _interference.bench import Bench, OutOfTime
from _interference.loads import NotComplete
from _interference.scenario import FULL, SMOKE, TYPICAL, trace_lengths
from _interference.variants import LEAN, VARIANTS
from _interference.variants import SMOKE as FEW
from _server import default_model
from _state import State

from paceline.errors import PacelineError

PARTS = {
    "interference": streams,
    "capacity": capacity,
    "burst": burst,
    "tenants": tenants,
    "batch": batch,
    "cost": cost,
}
INTERRUPTED = 130
TRACE = Path(__file__).parents[2] / "shared" / "data" / "azure_conv_2023.csv"


def main() -> int:
    """The command."""
    args = arguments(__doc__, _add)
    if not args.model.exists():
        print(f"interference: skipped, {args.model} is not there; run `paceline pull smollm2-135m` first")
        return 0
    report = Report("interference", args)
    if args.quick:
        from _interference.quick import quick

        quick(args.model, report)
        report.finish()
        return 0
    lengths = list(trace_lengths(args.trace)) if args.trace.exists() else []
    parts = args.part or list(PARTS)
    if not lengths:
        report.note("only interference", f"the others need the trace: {args.trace} is not there")
        parts = ["interference"]
    bench = Bench(
        model=args.model,
        state=State(args.out / "smoke" if args.smoke else args.out),
        size=SMOKE if args.smoke else FULL,
        report=report,
        scenario=TYPICAL,
        lengths=lengths,
        variants=FEW if args.smoke else LEAN if args.lean else VARIANTS,
        until_s=time.monotonic() + 60 * args.minutes,
    )
    code = carry_out(bench, parts)
    report.finish()
    return code


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=default_model(), help="a .gguf file or a folder")
    parser.add_argument("--out", type=Path, default=Path("results/interference"), help="where results are kept")
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="repeatable; all, in order, by default")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin nothing that would end later (90)")
    parser.add_argument("--lean", action="store_true", help="fewer settings of each preset: two thirds of the time")
    parser.add_argument("--smoke", action="store_true", help="every part in small, to see that it works")
    parser.add_argument("--trace", type=Path, default=TRACE, help="the Azure conversation trace of 2023, as CSV")


def carry_out(bench: Bench, parts: list[str]) -> int:
    """Measure what is missing, then tell what is there: also when time runs out, or on Ctrl-C. The exit code."""
    report, code = bench.report, 0
    if bench.size is SMOKE:
        report.note("smoke", "these sizes prove nothing but that every part works")
    report.note("time, on two AVX2 cores", f"about {_left_s(bench, parts) / 60:.0f} min of what is not measured yet")
    try:
        bench.scenario = streams.measure_scenario(bench)
        scenario = bench.scenario
        report.note(
            f"a prompt of {bench.size.long_in} tokens alone, to its first token",
            f"{scenario.prefill_s:.3g} s; one comes every {scenario.period_s:.3g} s",
        )
        report.note(
            "gap of eight undisturbed streams", f"{1000 * scenario.gap_s:.3g} ms; itl_ms = {1000 * scenario.itl_s:.3g}"
        )
        report.note("ttft_ms", f"{1000 * scenario.ttft_s:.0f}, four times a long prompt alone")
        report.note("time, on this machine", f"about {_left_s(bench, parts) / 60:.0f} min")
        for name in parts:
            code |= _measure(bench, name)
    except KeyboardInterrupt:
        report.note("interrupted", "the same command goes on from here")
        code = INTERRUPTED
    if bench.scenario is TYPICAL:
        return code
    for name in parts:
        PARTS[name].tell(bench)
    report.note("written", [str(path) for path in figures.write(bench)])
    if bench.left_out:
        report.note("left out, for want of time", f"{', '.join(bench.left_out)} and what follows")
    return code


def _measure(bench: Bench, name: str) -> int:
    """One part; 1 when it broke down, which the others need not."""
    try:
        PARTS[name].measure(bench)
    except OutOfTime as out:
        print(f"{name}: no time left for {out}", file=sys.stderr)
    except (NotComplete, PacelineError, SystemExit) as error:  # SystemExit: the server did not come up
        bench.report.note(f"{name} BROKE DOWN", f"{error}; the same command tries it again")
        return 1
    return 0


def _left_s(bench: Bench, parts: list[str]) -> float:
    return sum(bench.left_s(PARTS[name].planned(bench)) for name in parts)


if __name__ == "__main__":
    sys.exit(main())
