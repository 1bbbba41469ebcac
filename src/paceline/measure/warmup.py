"""Requests before the run, with prompts that the run never uses: they warm the server's code, not its prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import Message, request_body, resolve
from paceline.measure.client import Client, ClientSettings, Job
from paceline.measure.plan import BenchPlan
from paceline.measure.probe import Found
from paceline.measure.prompts import PromptMaker
from paceline.measure.records import Phase, RequestRecord
from paceline.measure.schedule import Arrival
from paceline.measure.threads import in_thread

TEXT_TOKENS = 256  # length of a warm-up prompt where the run's prompts are texts


async def warm_up(plan: BenchPlan, found: Found, key: str, arrivals: list[Arrival]) -> list[RequestRecord]:
    """Carry the warm-up and return its records, times relative to its own start."""
    count = min(plan.client.warmup_requests, len(arrivals))
    maker = PromptMaker(plan.seed, f"{plan.prompts.salt}:warmup", found.fit, found.words)
    records: list[RequestRecord] = []
    alarm = Alarm(asyncio.get_running_loop())
    settings = ClientSettings(timeout_s=plan.client.timeout_s, keep_text=False)
    endpoint = await in_thread(lambda: resolve(plan.target, key))
    client = Client(endpoint, settings, alarm, t0=clock())
    left = iter(arrivals[:count])
    over = asyncio.Event()
    running = 0

    def ask() -> None:
        nonlocal running
        arrival = next(left, None)
        if arrival is None:
            if running == 0:
                over.set()
            return
        running += 1
        body = request_body(plan.target, found.features, *_content(plan, maker, arrival))
        labels = {"id": f"w{arrival.index}", "index": arrival.index, "phase": Phase.WARMUP}
        client.submit(Job(clock() - client.t0, body, labels, plan.target.stream, plan.target.choices), ended)

    def ended(record: RequestRecord) -> None:
        nonlocal running
        running -= 1
        records.append(record)
        ask()

    try:
        for _ in range(min(count, max(1, plan.client.warmup_concurrency))):
            ask()
        if count:
            await over.wait()
    finally:
        await client.close()
        alarm.close()
    return records


def _content(plan: BenchPlan, maker: PromptMaker, arrival: Arrival) -> tuple[str | list[Message], int]:
    if arrival.texts or arrival.messages:
        arrival = msgspec.structs.replace(arrival, texts=(), messages="", inputs=(TEXT_TOKENS,) * arrival.turns)
    text = maker.text(arrival)
    return (text if plan.target.endpoint == "completions" else [{"role": "user", "content": text}]), arrival.outputs[0]


def all_failed(records: Iterable[RequestRecord]) -> str | None:
    """The first failure's message when there are records and none succeeded."""
    rows = list(records)
    if not rows or any(r.ok for r in rows):
        return None
    return rows[0].error_message or str(rows[0].error)
