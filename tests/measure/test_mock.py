"""The mock keeps its script, and says how well it did; the T46 case comes out of it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import resolve
from paceline.measure.client import Client, ClientSettings, Job
from paceline.measure.mock import MockServer
from paceline.measure.mockapi import MockApi, MockConfig, MockProcess
from paceline.measure.once import measure_once
from paceline.measure.plan import Target
from paceline.measure.records import RequestRecord


def test_the_log_tells_when_each_step_was_really_written() -> None:
    async def work() -> tuple[RequestRecord, MockServer]:
        api = MockApi(MockConfig(ttft_ms=30, itl_ms=10))
        async with MockServer(api) as server:
            return await measure_once(Target(url=server.url, model="mock"), max_tokens=5), server

    record, server = asyncio.run(work())
    log = server.logs[record.server_request_id]
    assert log.planned_s == pytest.approx([0.03, 0.04, 0.05, 0.06, 0.07])
    late = [w - log.received - p for p, w in zip(log.planned_s, log.written, strict=True)]
    assert all(value >= 0 for value in late)


def test_alarms_ring_in_order_and_not_early() -> None:
    async def work() -> list[tuple[float, float]]:
        alarm = Alarm(asyncio.get_running_loop())
        rung: list[tuple[float, float]] = []
        start = clock()
        over = asyncio.Event()

        def ring(due: float) -> None:
            rung.append((due, clock() - start))
            if len(rung) == 6:
                over.set()

        for due in (0.03, 0.01, 0.02, -1.0, 0.01, 0.0005):
            alarm.at(start + due, lambda due=due: ring(due))  # type: ignore[misc]
        await asyncio.wait_for(over.wait(), 5)
        alarm.close()
        return rung

    rung = asyncio.run(work())
    assert [due for due, _ in rung] == [-1.0, 0.0005, 0.01, 0.01, 0.02, 0.03]
    assert all(at >= due for due, at in rung)


def test_the_process_serves_until_it_is_left() -> None:
    with MockProcess(MockConfig(ttft_ms=1, itl_ms=1, api_key="k")) as mock:
        with httpx.Client(base_url=mock.url, trust_env=False) as http:
            assert http.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer k"}
            assert http.get("/v1/models", headers=headers).json()["data"][0]["id"] == "mock"
            assert http.post("/tokenize", headers=headers, json={"prompt": "a b"}).json()["count"] == 2
            assert "vllm:prompt_tokens_total" in http.get("/metrics").text
            assert http.get("/nothing", headers=headers).status_code == 404
        url = mock.url
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_one_at_a_time_service_with_a_stall_shows_its_queue_from_the_schedule() -> None:
    """The coordinated-omission case in small: arrivals every 10 ms, service 1 ms, a stall of 200 ms."""
    config = MockConfig(service_ms=1.0, stall_at_s=0.495, stall_for_s=0.205, log=False)  # begins between two arrivals

    async def work() -> list[RequestRecord]:
        async with MockServer(MockApi(config)) as server:
            target = Target(url=server.url, model="mock")
            alarm = Alarm(asyncio.get_running_loop())
            client = Client(resolve(target, ""), ClientSettings(), alarm)
            await client.open(8)
            client.t0 = clock() + 0.02
            records: list[RequestRecord] = []
            over = asyncio.Event()
            body = b'{"model":"mock","messages":[],"stream":true,"max_tokens":1}'

            def done(record: RequestRecord) -> None:
                records.append(record)
                if len(records) == 100:
                    over.set()

            for i in range(100):
                job = Job(i * 0.01, body, {"id": f"r{i}", "index": i})
                alarm.at(client.t0 + i * 0.01, lambda job=job: client.submit(job, done))  # type: ignore[misc]
            await asyncio.wait_for(over.wait(), 20)
            await client.close()
            alarm.close()
            return sorted(records, key=lambda r: r.index)

    records = asyncio.run(work())
    latencies = [(r.closed_s or 0) - r.scheduled_s for r in records]
    # Arrival 50 meets the whole stall, arrival 60 half of it, and each queues behind those before.
    assert latencies[50] == pytest.approx(0.201, abs=0.05)
    assert latencies[60] == pytest.approx(0.111, abs=0.05)
    assert latencies[10] < 0.05
    assert latencies[90] < 0.05
