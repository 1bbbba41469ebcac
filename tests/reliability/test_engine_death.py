"""`kill -9` of the engine under load: everybody is told at once, and the server tells the truth about itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.reliability.engines import NAME, Fake
from tests.reliability.served import RawClient, Served, completion, running, served

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOLD_WITHIN_S = 1.0

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the engine by /proc")


async def _kill_under_load(server: Served) -> None:
    """Kill the engine while it streams, answers whole and has a queue; every client gets its error in time."""
    bodies = [completion(4000, stream=number % 4 != 0) for number in range(80)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await RawClient.post(server, body)) for body in bodies]
        await asyncio.to_thread(server.wait_metric, "num_requests_running", 48.0)
        await asyncio.to_thread(server.wait_metric, "num_requests_waiting", 32.0)
        for client, body in zip(clients[:40], bodies, strict=False):
            if body["stream"]:
                await client.until(b'"text":')
        pid = server.engine_pid()
        assert pid is not None
        endings = [asyncio.create_task(_read_error(client)) for client in clients]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        last = max(await asyncio.gather(*endings))
    assert last - killed < TOLD_WITHIN_S, f"the last client heard of it after {last - killed:.2f} s"


async def _read_error(client: RawClient) -> float:
    """Read until the error is there; when that was."""
    async with asyncio.timeout(30.0):
        await client.until(b'"code":"engine_dead"')
    return time.monotonic()


def test_the_death_of_the_engine_is_told_to_everybody_and_ends_the_server() -> None:
    with served(Fake(delay_s=0.005, max_num_seqs=48)) as server:
        assert server.status("/health") == 200
        asyncio.run(_kill_under_load(server))
        assert server.status("/health") in (503, None)
        assert server.process.wait(20) not in (0, None)
        assert server.status("/health") is None


def test_a_supervised_engine_is_ready_again_within_its_cold_start() -> None:
    spawned = time.monotonic()
    with served(Fake(delay_s=0.005, max_num_seqs=48, load_s=0.5, restart=True)) as server:
        cold_start = time.monotonic() - spawned
        first = server.engine_pid()
        asyncio.run(_kill_under_load(server))
        assert server.status("/health") == 503
        server.wait_ready(within_s=cold_start + 5.0)
        assert server.engine_pid() not in (first, None)
        assert asyncio.run(_ask(server)).startswith("HTTP/1.1 200")
        assert server.metric("num_requests_running") == 0.0


async def _ask(server: Served, model: str = NAME) -> str:
    async with await RawClient.post(server, completion(5, model=model)) as client:
        return await client.until(b"[DONE]")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_engine_that_is_killed_is_ready_again_within_its_cold_start() -> None:
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "models" / MODEL_FILE
    if not file.is_file():
        pytest.skip(f"{MODEL_FILE} is not in the cache; run `paceline pull` first")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paceline = str(Path(sys.executable).parent / "paceline")
    command = [paceline, "serve", "--model", str(file), "--kv-gib", "0.5", "--port", port, "--restart"]
    with running(command) as process:
        server = Served(process, f"http://127.0.0.1:{port}")
        began = time.monotonic()
        server.wait_ready(within_s=300.0)
        cold_start = time.monotonic() - began
        model: str = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        assert asyncio.run(_ask(server, model)).startswith("HTTP/1.1 200")
        asyncio.run(_kill_in_the_stream(server, model))
        assert server.status("/health") == 503
        server.wait_ready(within_s=cold_start * 1.5 + 5.0)  # the machine may be busier than it was
        assert asyncio.run(_ask(server, model)).startswith("HTTP/1.1 200")


async def _kill_in_the_stream(server: Served, model: str) -> None:
    pid = server.engine_pid()
    assert pid is not None
    async with await RawClient.post(server, completion(2000, model=model, ignore_eos=True)) as client:
        await client.until(b'"text":')
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(TOLD_WITHIN_S):
            await client.until(b'"code":"engine_dead"')
