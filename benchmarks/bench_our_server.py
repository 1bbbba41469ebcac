"""Every load model against a `paceline serve` of our own: does the client agree with the server's own clock?

    python benchmarks/bench_our_server.py [--quick] [--json FILE] [--model FILE] [--keep FOLDER]

Constant, Poisson, gamma, ramp, burst, trace, closed loop and conversations, each a real run over sockets. What the
client measured from the send is held against the server's /metrics over the same stretch: the means of TTFT and of the
whole answer against sum / count, within 5 ms, every percentile of TTFT against the server's bucket. Both clocks tick
in one machine, so what remains is the network's and the event loops' share.

The rate is 0.6 of what one request at a time would fill, found first, so that the server is asked and not flooded.
The verdicts are printed too: a run may be thin or drift, and the two clocks must agree even so. On a machine that has
other work every wake-up waits for a processor, which only adds to the difference: a run that disagrees is made again,
twice at most, and how often is printed. Exit code 1 when a load model never agreed. `--keep` leaves the runs and their
reports there. `--quick` takes about a minute on a machine with nothing else to do, half of it the server's start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from _common import Report, arguments
from _server import default_model, server

from paceline.measure.analysis import Analysis, analyse
from paceline.measure.crosscheck import TOLERANCE_S
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target, Trace
from paceline.measure.report.write import write_run
from paceline.measure.runner import run

CHECKED = ("ttft_s", "e2e_s")  # means that are held against the server's; gaps are printed beside them
ATTEMPTS = 3
LOAD = 0.6  # of what one request at a time would fill
MOST_PER_S = 5.0
SEED_OF_ONE = 99


def plans(url: str, trace: Path, *, requests: int, rate: float) -> dict[str, BenchPlan]:
    """One plan for each load model, all of about as many requests."""
    span = requests / rate
    # Short answers: the load is to be right here, not heavy. The chat template alone is some thirty tokens.
    prompts = Prompts(input=Length(kind="uniform", value=48, low=40, high=56), output=Length(value=4))
    talks = Prompts(
        input=Length(value=40),
        output=Length(value=4),
        turns=Length(value=3),
        think=Length(value=100, low=0),
        turn_input=Length(value=8),
    )
    loads = {
        "constant": Load(arrivals=Arrivals.CONSTANT, rate=rate, requests=requests),
        "poisson": Load(rate=rate, requests=requests),
        "gamma": Load(arrivals=Arrivals.GAMMA, burstiness=0.5, rate=rate, requests=requests),
        "ramp": Load(rate=0.5 * rate, ramp_to=1.5 * rate, duration_s=span),
        "burst": Load(
            rate=0.5 * rate, burst_rate=2.5 * rate, burst_every_s=span / 2, burst_for_s=span / 8, duration_s=span
        ),
        "trace": Load(arrivals=Arrivals.TRACE),
        "closed": Load(arrivals=Arrivals.CLOSED, concurrency=2, requests=requests),
        "multi-turn": Load(rate=rate / 3, requests=max(2, requests // 3)),
    }
    return {
        name: BenchPlan(
            target=Target(url=url),
            load=load,
            prompts=talks if name == "multi-turn" else prompts,
            trace=Trace(path=str(trace)) if name == "trace" else None,
            client=ClientPlan(self_check=False, warmup_requests=2, warmup_concurrency=1),
            seed=seed,  # other texts in each: no load model warms the cache for the next
            name=f"{name} load on our own server",
        )
        for seed, (name, load) in enumerate(loads.items())
    }


def write_trace(path: Path, *, requests: int, rate: float) -> None:
    """A trace in our own format: uneven gaps, lengths of their own, every second request with a shared prefix."""
    rng = random.Random(7)
    at = 0.0
    rows = []
    for i in range(requests):
        blocks = [0, 1, 100 + i] if i % 2 else [200 + i, 300 + i, 400 + i]
        rows.append({"at_s": at, "input_tokens": 40 + rng.randrange(8), "output_tokens": 4, "hash_ids_16": blocks})
        at += rng.choice((0.5, 1.5)) / rate
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def show(report: Report, name: str, analysis: Analysis) -> bool:
    """The rows of one run; whether its means and percentiles agree with the server's."""
    crosscheck, verdict = analysis.crosscheck, analysis.verdict
    report.note(f"{name}: verdict", f"{verdict.outcome.value}  {verdict.headline}")
    if not crosscheck.comparable:
        report.note(f"{name}: not comparable", crosscheck.why)
        return False
    right = True
    for row in crosscheck.means:
        if row.client is None or row.server is None:
            continue
        report.add(f"{name}: mean {row.name.removesuffix('_s')}, client", [1e3 * row.client], "ms")
        report.add(
            f"{name}: mean {row.name.removesuffix('_s')}, client less server", [1e3 * (row.client - row.server)], "ms"
        )
        right &= row.agrees is True or row.name not in CHECKED
    wrong = [
        f"p{row.q:g} {1e3 * row.client:.1f} ms not in ({row.low:g}, {row.high:g}] s"
        for row in crosscheck.buckets
        if not row.agrees
    ]
    report.note(f"{name}: percentiles in the server's buckets", "; ".join(wrong) or f"all {len(crosscheck.buckets)}")
    return right and not wrong and bool(crosscheck.buckets)


@contextlib.contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """Where the runs go: a folder of the user's, or one that is gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as path:
        yield Path(path)


def seconds_for_one(url: str, out: Path) -> float:
    """How long one request alone takes."""
    load = Load(arrivals=Arrivals.CLOSED, concurrency=1, requests=3)
    plan = plans(url, out, requests=1, rate=1.0)["closed"]
    folder = run(msgspec.structs.replace(plan, load=load, seed=SEED_OF_ONE), out)
    return statistics.median(r.closed_s - r.scheduled_s for r in folder.records() if r.ok and r.closed_s is not None)


def agreeing(report: Report, name: str, plan: BenchPlan, out: Path, *, keep: bool) -> bool:
    """Run one load model until it agrees, at most ATTEMPTS times."""
    for attempt in range(1, ATTEMPTS + 1):
        prompts = msgspec.structs.replace(plan.prompts, salt=str(attempt))  # a cold cache each time
        folder = run(msgspec.structs.replace(plan, prompts=prompts), out / f"{name}-{attempt}")
        if not folder.manifest.complete:
            sys.exit(f"{name}: stopped")
        analysis = analyse(folder)
        if keep:
            write_run(analysis, folder.path)
        if show(report, name, analysis):
            return True
        report.note(f"{name}: disagrees", f"attempt {attempt} of {ATTEMPTS}")
    return False


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, default=default_model(), help="what to serve; the default model")
        parser.add_argument("--keep", type=Path, help="leave the runs with their reports in this folder")

    args = arguments(__doc__, add)
    report = Report("bench_our_server", args)
    requests = 5 if args.quick else 100
    with server(args.model) as url, folder_for(args.keep) as out:
        rate = min(MOST_PER_S, LOAD / seconds_for_one(url, out / "alone"))
        report.note("rate", f"{rate:.2f} requests per second")
        trace = out / "trace.jsonl"
        write_trace(trace, requests=requests, rate=rate)
        stated = plans(url, trace, requests=requests, rate=rate)
        keep = args.keep is not None
        wrong = [name for name, plan in stated.items() if not agreeing(report, name, plan, out, keep=keep)]
    limit = f"within {1e3 * TOLERANCE_S:g} ms, same buckets"
    report.note("client and server", f"disagree on {', '.join(wrong)}" if wrong else f"agree ({limit})")
    report.finish()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
