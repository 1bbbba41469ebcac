"""Plays the pack to our own client over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from paceline.measure.alarm import Alarm, clock
from paceline.measure.client import Client, ClientSettings, Endpoint, Job
from paceline.measure.conformance.check import TOLERANCE_MS, CaseResult, compare, observe
from paceline.measure.conformance.script import Case, play
from paceline.measure.metrics import measure
from paceline.measure.mock import MockRequest, MockServer, Play
from paceline.measure.records import RequestRecord

RETRIES = 2
AT_ONCE = 8  # cases that run side by side: enough to be quick, few enough not to disturb one another


async def run_pack(cases: Sequence[Case], tolerance_ms: float = TOLERANCE_MS) -> list[CaseResult]:
    """Play every case to our client; results in the order of the cases."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> CaseResult:
        async with gate:
            return await run_case(case, tolerance_ms)

    # A case that moves the clock would move it for its neighbours too.
    quiet = await asyncio.gather(*(one(case) for case in cases if not case.ask.clock_step_s))
    by_id = {result.case.id: result for result in quiet}
    results = [by_id.get(case.id) or await run_case(case, tolerance_ms) for case in cases]
    for i, result in enumerate(results):
        # A neighbour's megabyte event may have kept the loop busy: a case that is wrong in time alone gets it alone.
        for _ in range(RETRIES):
            if results[i].only_times_differ:
                results[i] = await run_case(result.case, tolerance_ms)
    return results


async def run_case(case: Case, tolerance_ms: float = TOLERANCE_MS) -> CaseResult:
    """One case on a server of its own, so that a reset or a hang harms no other."""
    record = await record_case(case)
    return compare(case, observe(measure(record)), tolerance_ms)


async def record_case(case: Case) -> RequestRecord:
    """Our client's record of one case."""
    attempts = 0

    def handler(_: MockRequest) -> Play:
        nonlocal attempts
        answer = case.answers[min(attempts, len(case.answers) - 1)]
        attempts += 1
        return play(answer)

    async with MockServer(handler) as server:
        alarm = Alarm(asyncio.get_running_loop())
        client = Client(endpoint_of(server.port, case), settings_of(case), alarm)
        try:
            await client.open(1)
            done: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
            with moved_clock(case.ask.clock_step_s, case.ask.clock_step_ms / 1e3):
                client.t0 = clock()
                client.submit(job_of(case), done.set_result)
                return await done
        finally:
            await client.close()
            alarm.close()


@contextlib.contextmanager
def moved_clock(by_s: float, after_s: float) -> Iterator[None]:
    """The wall clock as Python code reads it, set by so much from then on. The monotonic clocks go on as they are."""
    if not by_s:
        yield
        return
    told, told_ns, begun = time.time, time.time_ns, time.monotonic()

    def moved() -> float:
        return told() + (by_s if time.monotonic() - begun >= after_s else 0.0)

    try:
        time.time = moved
        time.time_ns = lambda: int(moved() * 1e9)
        yield
    finally:
        time.time, time.time_ns = told, told_ns


def settings_of(case: Case) -> ClientSettings:
    ask = case.ask
    return ClientSettings(
        timeout_s=ask.timeout_ms / 1e3, retries=ask.retries, retry_cap_s=ask.retry_cap_ms / 1e3, keep_text=True
    )


def endpoint_of(port: int, case: Case) -> Endpoint:
    path = "/v1/completions" if case.ask.endpoint == "completions" else "/v1/chat/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        "accept-encoding: gzip\r\ncontent-length: "
    )
    return Endpoint(host="127.0.0.1", port=port, addresses=("127.0.0.1",), head=head.encode())


def job_of(case: Case) -> Job:
    ask = case.ask
    return Job(
        scheduled_s=0.0,
        body=b'{"model":"%b"}' % case.id.encode(),
        labels={"id": case.id, "index": 0},
        stream=ask.stream,
        choices=ask.choices,
        forced=ask.max_tokens if ask.forced else None,
    )
