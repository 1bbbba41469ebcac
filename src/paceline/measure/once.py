"""One request, measured and recorded exactly as in a run. For conformance cases and for looking closer."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import Features, request_body, resolve
from paceline.measure.client import Client, ClientSettings, Job
from paceline.measure.plan import Target
from paceline.measure.records import RequestRecord


async def measure_once(
    target: Target,
    *,
    prompt: str = "hello",
    max_tokens: int = 16,
    forced: bool = False,
    settings: ClientSettings | None = None,
    key: str = "",
    body: bytes | None = None,
    labels: dict[str, Any] | None = None,
) -> RequestRecord:
    """The record of one request, due at once. `body` replaces the request body that would be made."""
    done: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
    if body is None:
        content: Any = prompt if target.endpoint == "completions" else [{"role": "user", "content": prompt}]
        body = request_body(target, Features(model=target.model or "mock"), content, max_tokens)
    endpoint = await asyncio.get_running_loop().run_in_executor(None, resolve, target, key)
    alarm = Alarm(asyncio.get_running_loop())
    client = Client(endpoint, settings or ClientSettings(), alarm, t0=clock())
    named = {"id": "r0", "index": 0, "output_tokens_wanted": max_tokens, "length_forced": forced, **(labels or {})}
    job = Job(clock() - client.t0, body, named, target.stream, target.choices, max_tokens if forced else None)
    try:
        client.submit(job, done.set_result)
        return await done
    finally:
        await client.close()
        alarm.close()
