"""Coordinated omission on real sockets: one server that stops for a second, counted three ways.

    python benchmarks/coordinated_omission.py [--quick] [--json FILE]

1,000 requests are due, one every 10 ms. The server answers first come, first served, in 1 ms each, and stands still
from second 5 to second 6. A hundred users fall into that second and wait up to 1,001 ms. Counted from the schedule the
p99 is 911 ms. A client that sends one at a time and counts from the send reports a p99 of a millisecond or a few: the
wait of all others happened before it sent them. From the schedule it too sees what they felt, and its own round trips
on top, which add up while it works off the queue. `--quick` is a third as long.

Exact values come from arithmetic, not from a server; with all sent, the measured ones should agree within 15 ms.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from _common import Report, arguments

from paceline.measure.calibrate import carry_to_mock
from paceline.measure.conformance.statistics import fifo_completions
from paceline.measure.metrics import measure
from paceline.measure.mockapi import MockConfig
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target
from paceline.measure.stats import percentile

EVERY_S, SERVICE_S = 0.010, 0.001
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 100.0)
TOLERANCE_MS = 15.0


def plan_of(count: int, cap: int | None) -> BenchPlan:
    """Evenly spaced arrivals of one-token requests, all at once or `cap` at a time."""
    return BenchPlan(
        target=Target(url="http://127.0.0.1:1"),
        load=Load(arrivals=Arrivals.CONSTANT, rate=1.0 / EVERY_S, requests=count, max_concurrency=cap),
        prompts=Prompts(input=Length(value=16), output=Length(value=1)),
        client=ClientPlan(connections=128 if cap is None else 2),
    )


def ranks(seconds: Sequence[float]) -> list[float]:
    """The percentiles of this benchmark in milliseconds, by nearest rank."""
    return [1e3 * (percentile(seconds, q, "nearest-rank") or 0.0) for q in PERCENTILES]


def main() -> int:
    args = arguments(__doc__)
    report = Report("coordinated_omission", args)
    count, stall_at, stall_for = (300, 1.5, 0.3) if args.quick else (1000, 5.0, 1.0)
    exact = ranks(
        [done - due for due, _, done in fifo_completions(count, EVERY_S, SERVICE_S, stall_at, stall_at + stall_for)]
    )
    # The stall begins between two arrivals: a hair of jitter must not decide on which side of it one falls.
    config = MockConfig(
        service_ms=1e3 * SERVICE_S, stall_at_s=stall_at - 0.005, stall_for_s=stall_for + 0.005, log=False
    )
    worst = 0.0
    for name, cap in (("all sent", None), ("one at a time", 1)):
        records = asyncio.run(carry_to_mock(plan_of(count, cap), config)).records
        requests = [measure(record) for record in records]
        response = ranks([request.ttft_s for request in requests if request.ttft_s is not None])
        service = ranks([request.ttft_service_s for request in requests if request.ttft_service_s is not None])
        for q, right, seen, sent in zip(PERCENTILES, exact, response, service, strict=True):
            label = "max" if q == 100.0 else f"p{q:g}"
            report.add(f"{name}: {label} from the schedule (exact {right:.0f})", [seen], "ms")
            report.add(f"{name}: {label} from the send", [sent], "ms")
            if cap is None:
                worst = max(worst, abs(seen - right))
    report.note("largest difference from exact, all sent [ms]", round(worst, 2))
    report.note("verdict", "right" if worst <= TOLERANCE_MS else f"WRONG by more than {TOLERANCE_MS:g} ms")
    report.finish()
    return 0 if worst <= TOLERANCE_MS else 1


if __name__ == "__main__":
    sys.exit(main())
