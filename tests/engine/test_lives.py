"""Many request lives through a real engine process, ended in every way there is."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from paceline.core.step import FinishReason
from paceline.engine.client import EngineClient, Stream
from tests.engine.fakes import expected_output, launch, spec

# Small enough that requests preempt each other all the time.
CROWDED = {"num_blocks": 48, "block_size": 4, "max_num_seqs": 24, "max_model_len": 128, "max_num_batched_tokens": 64}
LIVES = 600


async def live(client: EngineClient, rng: random.Random, index: int) -> FinishReason | None:
    """One life; its finish reason if the reader stayed to hear it."""
    prompt, max_tokens = tuple(rng.choices(range(50), k=rng.randint(1, 60))), rng.randint(1, 30)
    end, after = rng.choice(["read", "cancel", "close", "drop", "interrupt"]), rng.randint(0, 10)
    stream = await client.submit(spec(f"r{index}", prompt, max_tokens))
    tokens: tuple[int, ...] = ()
    finish = None
    async for update in stream:
        assert finish is None, "an update after the last one"
        tokens, finish = tokens + update.tokens, update.finish
        if len(tokens) >= after:
            if end == "cancel":
                client.cancel(stream.request_id)
            elif end == "close":
                await stream.aclose()
            elif end == "interrupt":
                await interrupt(stream)
                break  # an update that came first is lost with the task
            elif end == "drop":
                break
    assert tokens == expected_output(prompt, max_tokens)[: len(tokens)]
    if end == "read":
        assert len(tokens) == max_tokens
    assert finish is not None or end in ("close", "drop", "interrupt")
    return finish.reason if finish is not None else None


async def interrupt(stream: Stream) -> None:
    """Cancel a task while it waits for the next update."""
    task = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("seed", range(2))
def test_every_kind_of_end_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)

    async def test() -> None:
        async with EngineClient(launch(scheduler=CROWDED)) as client:
            gate = asyncio.Semaphore(64)

            async def gated(index: int) -> FinishReason | None:
                async with gate:
                    return await live(client, rng, index)

            ends = await asyncio.gather(*map(gated, range(LIVES)))
            assert {FinishReason.LENGTH, FinishReason.ABORT, None} <= set(ends)
            gc.collect()
            # Until a heartbeat after the last step.
            while client.live_requests or client.stats.last_step is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stats = client.stats.scheduler
            assert stats.preemptions > 0
            assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert client.stats.errors == 0

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())
