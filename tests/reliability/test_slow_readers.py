"""Many who ask for much and read nothing, beside one who reads: real sockets, real server, real engine process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time

import pytest

from tests.reliability.engines import Fake
from tests.reliability.served import RawClient, Served, allow_open_files, completion, served

TOKENS = 180
# Over 100 KB for each reader, even where several tokens share an event: beyond what the server buffers (64 KiB) and
# what the kernel is told to hold.
GREEDY_BODY = completion(TOKENS, logprobs=5)
BUFFER = 4096

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at queues in /proc")


def test_a_thousand_slow_readers_do_not_slow_a_fast_one() -> None:
    allow_open_files(1500)  # for our ends, and by inheritance for the server's
    with served(Fake(delay_s=0.001, send_buffer=BUFFER)) as server:
        asyncio.run(_check(server, 1000))


async def _check(server: Served, count: int) -> None:
    before = min([await _read_one(server) for _ in range(5)])
    async with contextlib.AsyncExitStack() as stack:
        slow = [
            await stack.enter_async_context(await RawClient.post(server, GREEDY_BODY, receive_buffer=BUFFER))
            for _ in range(count)
        ]
        # They are being answered now, and none of them reads: if anybody waited for them, this would not return.
        await _read_one(server)
        # The engine has done with them all, although no one has taken what it made.
        await asyncio.to_thread(server.wait_metric, "num_requests_running", 0.0)
        await asyncio.to_thread(server.wait_metric, "generation_tokens_total", float(TOKENS * (count + 6)))
        await asyncio.to_thread(server.wait_unsent, count)
        beside = min([await _read_one(server) for _ in range(5)])
        assert beside < 3 * before + 0.1, f"{before:.3f} s alone, {beside:.3f} s beside {count} slow readers"
        # And the slow ones have lost nothing.
        for client in slow[:: count // 10]:
            text = await client.until(b"[DONE]")
            # A reader that comes late gets several tokens in one event.
            assert sum(map(len, re.findall(r'"text":"([a-z]*)"', text))) == TOKENS


async def _read_one(server: Served) -> float:
    """Seconds of one request that is read as it comes."""
    start = time.perf_counter()
    async with await RawClient.post(server, completion(TOKENS)) as client:
        async with asyncio.timeout(60.0):
            answer = await client.until(b"[DONE]")
    assert answer.startswith("HTTP/1.1 200")
    return time.perf_counter() - start
