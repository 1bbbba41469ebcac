"""How wrong the load generator's own clock readings are, and where its limit lies: against the built-in exact mock.

    python benchmarks/bench_client.py [--quick] [--json FILE] [--workers N] [--streams N]

Three questions, each against the mock in a process of its own, on this machine:
  streams   so many concurrent streams at 50 tokens a second each, one worker process: how far the reported TTFT and
            gaps are from the mock's script. Target at 200 streams: median TTFT error <= 2 ms, p99 ITL error <= 3 ms.
            The mock's own lateness is part of that error and printed beside it
  limit     the streams doubled until a target or the event loop's lag limit (p99 10 ms) breaks
  schedule  a stalled first-come-first-served server (arrivals every 10 ms, service 1 ms, a stall from 5 s to 6 s):
            latencies from the schedule should be p50 1, p90 101, p95 551, p99 911, max 1001 ms; and the achieved rate

Quiet machines only: whatever else runs moves every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from _common import Report, arguments

from paceline.measure.calibrate import LAG_LIMIT_MS, carry_to_mock, measure_against_mock
from paceline.measure.mockapi import MockConfig
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target
from paceline.measure.records import RequestRecord, SelfCheck
from paceline.measure.stats import percentile

TARGET_STREAMS = 200
TTFT_TARGET_MS = 2.0
ITL_TARGET_MS = 3.0
# (percentile, milliseconds) that the coordinated-omission case must give from the schedule.
EXPECTED = ((50.0, 1.0), (90.0, 101.0), (95.0, 551.0), (99.0, 911.0), (100.0, 1001.0))
QUICK_EXPECTED = ((100.0, 201.0),)


def streams_plan(streams: int, tokens: int, workers: int) -> BenchPlan:
    """All streams begin within a second and run together for the rest."""
    return BenchPlan(
        target=Target(url="http://127.0.0.1:1"),
        load=Load(arrivals=Arrivals.CLOSED, concurrency=streams, requests=streams, stagger_s=1.0),
        prompts=Prompts(input=Length(value=64), output=Length(value=tokens)),
        client=ClientPlan(workers=workers, self_check=False, keep_text=False),
    )


def in_target(check: SelfCheck) -> bool:
    return (
        check.ttft_error_p50_ms is not None
        and abs(check.ttft_error_p50_ms) <= TTFT_TARGET_MS
        and (check.itl_error_p99_ms or 0.0) <= ITL_TARGET_MS
        and (check.lag_p99_ms or 0.0) <= LAG_LIMIT_MS
    )


def measure(report: Report, streams: int, tokens: int, workers: int, repeats: int) -> bool:
    """One row of figures a quantity; whether the middle one is inside the targets."""
    plan = streams_plan(streams, tokens, workers)
    checks = [asyncio.run(measure_against_mock(plan)) for _ in range(repeats)]
    for label, name in (
        ("TTFT error, median", "ttft_error_p50_ms"),
        ("TTFT error, p99", "ttft_error_p99_ms"),
        ("ITL error, median", "itl_error_p50_ms"),
        ("ITL error, p99", "itl_error_p99_ms"),
        ("mock's own lateness, p99", "mock_late_p99_ms"),
        ("event loop lag, p99", "lag_p99_ms"),
    ):
        report.add(f"{streams} streams: {label}", [getattr(check, name) or 0.0 for check in checks], "ms")
    report.add(f"{streams} streams: CPU of the busiest worker", [100 * (check.cpu or 0.0) for check in checks], "%")
    return sum(map(in_target, checks)) * 2 > len(checks)


def limit(report: Report, tokens: int, workers: int, most: int) -> None:
    """Double the streams until it breaks."""
    best, streams = 0, TARGET_STREAMS
    while streams <= most and measure(report, streams, tokens, workers, 1):
        best, streams = streams, streams * 2
    report.note("limit", f"{best} streams at 50 tokens/s inside the targets, {min(streams, most)} tried")


def schedule_case(report: Report, quick: bool) -> None:
    """The stalled server, and the rate that was really sent."""
    # The stall begins between two arrivals: a hair of jitter must not decide on which side of it one falls.
    count, stall_at, stall_for = (300, 0.995, 0.205) if quick else (1000, 4.995, 1.005)
    config = MockConfig(service_ms=1.0, stall_at_s=stall_at, stall_for_s=stall_for, log=False)
    plan = BenchPlan(
        target=Target(url="http://127.0.0.1:1"),
        load=Load(arrivals=Arrivals.CONSTANT, rate=100, requests=count),
        prompts=Prompts(input=Length(value=16), output=Length(value=1)),
        client=ClientPlan(connections=128),
    )
    records = asyncio.run(carry_to_mock(plan, config)).records
    latencies = [1e3 * ((r.closed_s or 0.0) - r.scheduled_s) for r in records if r.ok]
    for q, expected in QUICK_EXPECTED if quick else EXPECTED:
        report.add(f"stalled server, p{q:g} (should be {expected:g})", [percentile(latencies, q) or 0.0], "ms")
    report.add("achieved rate over planned", [achieved(records)], "ratio")


def achieved(records: list[RequestRecord]) -> float:
    """Planned span over the span in which requests really left."""
    sent = [(r.scheduled_s, r.dispatched_s) for r in records if r.dispatched_s is not None]
    planned = max(due for due, _ in sent) - min(due for due, _ in sent)
    return planned / (max(at for _, at in sent) - min(at for _, at in sent))


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--workers", type=int, default=1, help="client processes")
        parser.add_argument("--streams", type=int, default=TARGET_STREAMS, help="streams of the first question")

    args = arguments(__doc__, add)
    report = Report("bench_client", args)
    tokens, repeats = (100, 1) if args.quick else (500, 5)
    held = measure(report, args.streams, tokens, args.workers, repeats)
    report.note("target", f"{args.streams} streams: {'inside' if held else 'OUTSIDE'} the targets")
    if not args.quick:
        limit(report, 100, args.workers, 6400)
    schedule_case(report, args.quick)
    report.finish()
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
