"""The client measured: the planned load against the built-in mock, whose times are known exactly.

What is left over is the client's own error, and it is printed with every result. The mock runs in a process of its
own on this machine, so its own lateness is measured too and stands beside the client's.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from paceline.measure.bodies import Features
from paceline.measure.fleet import Fleet
from paceline.measure.folder import read_rows
from paceline.measure.jobs import WorkerJob
from paceline.measure.mockapi import MockConfig, MockProcess
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target
from paceline.measure.records import RequestRecord, SelfCheck, TokenFit, WorkerSample
from paceline.measure.schedule import build_schedule, encode

MOCK_TTFT_MS = 200.0
MOCK_ITL_MS = 20.0
LATE_LIMIT_MS = 5.0
LAG_LIMIT_MS = 10.0
PEAK_RATE = 2000.0  # an open loop's rate is checked up to this, for about three seconds
CHECK_TOKENS = 100  # a response: long enough that all streams of a closed loop run at once
_SECONDS = 3.0


def check_plan(plan: BenchPlan) -> BenchPlan:
    """The load of a plan in small: its concurrency or rate, short prompts, the mock's pace."""
    load = plan.load
    output = Length(value=CHECK_TOKENS)
    if load.arrivals is not Arrivals.CLOSED:
        output = Length(value=round(min(CHECK_TOKENS, max(2.0, plan.prompts.output.value))))
    if load.arrivals is Arrivals.CLOSED:
        small = Load(arrivals=Arrivals.CLOSED, concurrency=load.concurrency, requests=load.concurrency, stagger_s=1.0)
    else:
        peak = max(load.rate or 1.0, load.ramp_to or 0.0, load.burst_rate or 0.0)
        if load.arrivals is Arrivals.TRACE and plan.trace is not None:
            peak = max(peak, _trace_peak(plan))
        rate = min(PEAK_RATE, peak)
        small = Load(
            arrivals=Arrivals.POISSON,
            rate=rate,
            requests=max(20, round(rate * _SECONDS)),
            max_concurrency=load.max_concurrency,
        )
    client = ClientPlan(workers=plan.client.workers, loop=plan.client.loop, self_check=False, keep_text=False)
    return BenchPlan(
        target=Target(url="http://127.0.0.1:1", endpoint=plan.target.endpoint),
        load=small,
        prompts=Prompts(input=Length(value=64), output=output),
        client=client,
        seed=plan.seed,
    )


def _trace_peak(plan: BenchPlan) -> float:
    """Requests in the trace's busiest second."""
    counts: dict[int, int] = {}
    for arrival in build_schedule(plan):
        second = int(arrival.at_s or 0.0)
        counts[second] = counts.get(second, 0) + 1
    return float(max(counts.values()))


async def self_check(plan: BenchPlan) -> SelfCheck:
    """Run the small load against the mock and compare with its script."""
    small = check_plan(plan)
    return await measure_against_mock(small)


async def measure_against_mock(
    small: BenchPlan, *, ttft_ms: float = MOCK_TTFT_MS, itl_ms: float = MOCK_ITL_MS
) -> SelfCheck:
    """Carry `small` to a mock of this pace; the client's error."""
    return judge(small, await carry_to_mock(small, MockConfig(ttft_ms=ttft_ms, itl_ms=itl_ms)), ttft_ms, itl_ms)


# By response id: when its request came, offsets planned, and when each was really written.
Logs = dict[str, tuple[float, list[float], list[float]]]


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of a load on the mock, seen from both ends."""

    records: list[RequestRecord]
    health: list[WorkerSample]
    logs: Logs


async def carry_to_mock(plan: BenchPlan, config: MockConfig) -> Carried:
    """The plan's load on a fresh mock and nothing else on it: no probe, no warm-up."""
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        path = Path(folder)
        (path / "schedule.jsonl").write_bytes(encode(build_schedule(plan)))
        with MockProcess(config) as mock:
            fleet = Fleet(lambda said: None)  # the workers' own files tell all
            try:
                await fleet.start(jobs_for(_aimed(plan, mock.url), path))
                fleet.go()
                await fleet.wait()
            finally:
                await fleet.close()
            logs = await asyncio.to_thread(lambda: httpx.get(f"{mock.url}/_log", timeout=30, trust_env=False).json())
        workers = range(plan.client.workers)
        records = [row for w in workers for row in read_rows(path / f"records.w{w}.jsonl", RequestRecord)]
        health = [row for w in workers for row in read_rows(path / f"health.w{w}.jsonl", WorkerSample)]
    return Carried(records, health, logs)


def _aimed(plan: BenchPlan, url: str) -> BenchPlan:
    return msgspec.structs.replace(plan, target=msgspec.structs.replace(plan.target, url=url))


def jobs_for(plan: BenchPlan, folder: Path) -> list[WorkerJob]:
    """Jobs against the mock, whose features are known."""
    return [
        WorkerJob(
            folder=str(folder),
            plan=plan,
            worker=worker,
            workers=plan.client.workers,
            features=Features(model="mock", ignore_eos=True),
            fit=TokenFit(method="none", overhead_tokens=MockConfig().overhead_tokens),
        )
        for worker in range(plan.client.workers)
    ]


def judge(plan: BenchPlan, carried: Carried, ttft_ms: float, itl_ms: float) -> SelfCheck:
    """Errors of the client's times against the script: TTFT from the schedule, gaps between events."""
    records, health, logs = carried.records, carried.health, carried.logs
    ttft: list[float] = []
    gaps: list[float] = []
    mock_late: list[float] = []
    for record in records:
        rows = record.token_rows()
        if not record.ok or not rows:
            continue
        times = [record.row_s(i) for i in rows]
        zero = record.scheduled_s + record.cap_wait_s
        ttft.append((times[0] - zero) * 1e3 - ttft_ms)
        gaps += [(b - a) * 1e3 - itl_ms for a, b in itertools.pairwise(times)]
        received, planned, written = logs.get(record.server_request_id, (0.0, [], []))
        mock_late += [(w - received - p) * 1e3 for p, w in zip(planned, written, strict=True)]
    late = [v * 1e3 for row in health for v in row.late_s]
    lags = [v * 1e3 for row in health for v in row.lags_s]
    cpu = _busiest_cpu(health)
    check = SelfCheck(
        streams=_most_in_flight(health),
        tokens_per_s=round(1e3 / itl_ms, 3) if itl_ms else 0.0,
        workers=plan.client.workers,
        requests=len(records),
        ttft_error_p50_ms=_q(ttft, 0.5),
        ttft_error_p99_ms=_q(map(abs, ttft), 0.99),
        itl_error_p50_ms=_q(map(abs, gaps), 0.5),
        itl_error_p99_ms=_q(map(abs, gaps), 0.99),
        late_p99_ms=_q(late, 0.99),
        lag_p99_ms=_q(lags, 0.99),
        mock_late_p99_ms=_q(mock_late, 0.99),
        cpu=cpu,
    )
    return _with_verdict(check, failed=sum(not r.ok for r in records))


def _with_verdict(check: SelfCheck, failed: int) -> SelfCheck:
    problems = []
    if failed:
        problems.append(f"{failed} of {check.requests} requests failed against the mock")
    if check.ttft_error_p50_ms is None:
        problems.append("no request gave a first token")
    if check.late_p99_ms is not None and check.late_p99_ms > LATE_LIMIT_MS:
        problems.append(f"requests left {check.late_p99_ms:.1f} ms late (p99; limit {LATE_LIMIT_MS:g})")
    if check.lag_p99_ms is not None and check.lag_p99_ms > LAG_LIMIT_MS:
        problems.append(f"the event loop lagged {check.lag_p99_ms:.1f} ms (p99; limit {LAG_LIMIT_MS:g})")
    return msgspec.structs.replace(check, ok=not problems, why="; ".join(problems))


def _q(values: Iterable[float], q: float) -> float | None:
    """Nearest-rank quantile, rounded to a microsecond; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)


def _most_in_flight(health: list[WorkerSample]) -> int:
    """Sum over workers of the most each had in flight."""
    most: dict[int, int] = {}
    for row in health:
        most[row.worker] = max(most.get(row.worker, 0), row.in_flight)
    return sum(most.values())


def _busiest_cpu(health: list[WorkerSample]) -> float | None:
    """Share of one core used by the busiest worker between its first and last sample."""
    shares = []
    for worker in {row.worker for row in health}:
        rows = sorted((row for row in health if row.worker == worker), key=lambda r: r.t_s)
        if rows[-1].t_s > rows[0].t_s:
            shares.append((rows[-1].cpu_s - rows[0].cpu_s) / (rows[-1].t_s - rows[0].t_s))
    return round(max(shares), 3) if shares else None
