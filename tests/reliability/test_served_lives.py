"""Clients of the real server that leave at any moment; nothing of theirs is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.reliability.engines import Fake
from tests.reliability.served import RawClient, Served, allow_open_files, completion, served


async def _live(server: Served, rng: random.Random) -> str:
    """One client from start to end; how it left."""
    fate = rng.choice(("stays", "stays", "at once", "soon", "in the stream", "in the stream", "after the end"))
    stream = rng.random() < 0.7
    tokens = rng.choice((1, 5, 40, 200))
    prompt = rng.choice(("", "a shared beginning of some length, then: ")) + "x" * rng.randrange(1, 300)
    body = completion(tokens, prompt=prompt, stream=stream, n=rng.choice((1, 1, 1, 3)))
    async with await RawClient.post(server, body) as client, asyncio.timeout(60.0):
        if fate == "soon":
            await asyncio.sleep(rng.random() * 0.05)
        elif fate == "in the stream":
            await client.until(b'"text":')
        elif fate != "at once":
            answer = await client.until(b"[DONE]" if stream else b'"usage":')
            assert answer.startswith("HTTP/1.1 200")
    return fate


@pytest.mark.parametrize("lives", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(lives: int) -> None:
    allow_open_files(1024)
    # Few blocks, few seats and small steps: there is a queue, prompts are computed in parts, and preemption happens.
    fake = Fake(delay_s=0.0005, num_blocks=128, max_num_seqs=24, max_num_batched_tokens=256)
    with served(fake) as server:

        async def crowd() -> list[str]:
            rng = random.Random(3)
            seats = asyncio.Semaphore(64)

            async def live(own: random.Random) -> str:
                async with seats:
                    return await _live(server, own)

            return await asyncio.gather(*(live(random.Random(rng.random())) for _ in range(lives)))

        fates = asyncio.run(crowd())
        assert len(set(fates)) == 5
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
            server.wait_metric(gauge, 0.0)
        assert server.metric("requests_aborted_total") > lives / 10
        assert server.metric("num_preemptions_total") > 0
        assert server.metric("engine_request_errors_total") == 0
        assert server.status("/health") == 200
