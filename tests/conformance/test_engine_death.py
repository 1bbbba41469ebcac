"""kill -9 of the engine under load, and a supervised engine that comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.conformance.conftest import LiveServer, start_server, stop_server


def engine_pid(server: LiveServer) -> int:
    """The one child process of the server that is an engine."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if b"paceline.engine.child" in command and int(parent) == server.process.pid:
            return int(entry.name)
    raise AssertionError("no engine process found")


async def load(server: LiveServer, streams: int) -> list[float]:
    """Streams that the engine's death ends; for each, when its error came. Kills once all have a token."""
    began = [asyncio.Event() for _ in range(streams)]

    async def one(client: openai.AsyncOpenAI, i: int) -> float:
        try:
            stream = await client.completions.create(
                model=server.model,
                prompt=f"Story {i}:",
                stream=True,
                max_tokens=1500,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                began[i].set()
        except openai.APIError:
            return time.monotonic()
        raise AssertionError("the stream ended as if nothing had happened")

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        tasks = [asyncio.create_task(one(client, i)) for i in range(streams)]
        for event in began:
            await asyncio.wait_for(event.wait(), 60)
        killed = time.monotonic()
        os.kill(engine_pid(server), signal.SIGKILL)
        return [ended - killed for ended in await asyncio.gather(*tasks)]


def test_killed_engine_tells_everybody_and_exits(tmp_path: Path) -> None:
    server = start_server(tmp_path)
    delays = asyncio.run(load(server, 8))
    assert server.process.wait(15) == 1
    assert max(delays) < 3  # 1 s is the promise; the rest is for a busy machine
    assert any("engine" in line and "dead" in line for line in server.output)
    stop_server(server)


@pytest.mark.slow  # every day, tests/reliability does the same without a model
def test_supervised_engine_comes_back(tmp_path: Path) -> None:
    server = start_server(tmp_path, "--restart")
    try:
        asyncio.run(load(server, 2))
        server.until(lambda: httpx.get(f"{server.url}/health", timeout=10).status_code == 200, 120)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, timeout=60)
        assert answer.status_code == 200
    finally:
        code = stop_server(server)
    assert code == 0
