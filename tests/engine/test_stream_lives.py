"""A mailbox under every order of events, on a loop whose time is made up; then paced streams of a real engine."""

from __future__ import annotations

import asyncio
import gc
import random
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.pace import Pace, Pacer
from paceline.core.step import Finish, FinishReason, RequestSpec, TokenLogprob
from paceline.engine.client import EngineClient
from paceline.engine.stream import Mailbox, Update
from paceline.errors import EngineDead
from tests.engine.fakes import expected_output, launch, spec

FINISH = Finish("r", FinishReason.LENGTH)
GAPS = st.sampled_from([0.0, 0.001, 0.02, 0.04, 0.1, 1.0])  # seconds
# What may happen to a mailbox, after a while: so many tokens, or nothing.
EVENTS = st.lists(st.tuples(GAPS, st.integers(0, 4)), max_size=25)
ENDS = st.sampled_from(["end", "fail", "discard"])


class MadeUpTime(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(_Jumps(self))
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def timers(self, of: Mailbox) -> int:
        """Timers that still hold a mailbox."""
        handles = self._scheduled  # type: ignore[attr-defined]
        return sum(not handle.cancelled() and getattr(handle._callback, "__self__", None) is of for handle in handles)


class _Jumps(selectors.SelectSelector):
    def __init__(self, loop: MadeUpTime) -> None:
        super().__init__()
        self._loop_of = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self._loop_of.now_s += timeout
        return found


def on_made_up_time(test: Callable[[MadeUpTime], Awaitable[None]]) -> None:
    loop = MadeUpTime()
    try:
        loop.run_until_complete(asyncio.wait_for(test(loop), 1e6))
        assert not asyncio.all_tasks(loop)
    finally:
        loop.close()


async def read(mailbox: Mailbox, slow_s: float, seen: list[tuple[float, Update]]) -> bool:
    """Take all there is; whether the engine died."""
    loop = asyncio.get_running_loop()
    try:
        while (update := await mailbox.take()) is not None:
            seen.append((loop.time(), update))
            await asyncio.sleep(slow_s)
    except EngineDead:
        return True
    return False


@settings(max_examples=200)
@given(
    EVENTS,
    ENDS,
    st.none() | st.builds(Pace, interval_s=st.sampled_from([1e-9, 0.01, 0.04, 5.0]), hold=st.integers(1, 4)),
    st.sampled_from([0.0, 0.005, 0.3]),
    st.booleans(),
)
def test_all_is_read_once_in_order_and_in_time(
    events: list[tuple[float, int]], end: str, pace: Pace | None, slow_s: float, scored: bool
) -> None:
    async def test(loop: MadeUpTime) -> None:
        mailbox = Mailbox("r", loop)
        mailbox.admitted.set_result(None)
        mailbox.keep(pace)
        line = None if pace is None else Pacer(pace)
        seen: list[tuple[float, Update]] = []
        reading = loop.create_task(read(mailbox, slow_s, seen))
        made, due = 0, []  # when each token may be read at the earliest
        for after_s, count in events:
            await asyncio.sleep(after_s)
            tokens = tuple(range(made, made + count))
            made += count
            mailbox.put(tokens, tuple(TokenLogprob(token, -0.5, 1) for token in tokens) if scored else ())
            due += line.show(loop.time(), count) if line is not None else [loop.time()] * count
        match end:
            case "end":
                mailbox.end(FINISH)
            case "fail":
                mailbox.fail("it died")
            case _:
                mailbox.discard()
        ended_s = loop.time()
        assert loop.timers(mailbox) == 0, "nothing waits for a stream that has ended"
        mailbox.put((99,), ())  # news that crossed the end
        mailbox.end(FINISH)
        assert await reading == (end == "fail")
        read_at = [(at, token) for at, update in seen for token in update.tokens]
        assert [token for _, token in read_at] == list(range(len(read_at)))
        assert all(at >= early - 1e-6 for (at, _), early in zip(read_at, due, strict=False))
        for _, update in seen:
            assert [one.token for one in update.logprobs] == (list(update.tokens) if scored else [])
        if end != "discard":
            assert len(read_at) == made
            assert all(at <= ended_s + 2 * slow_s + 1e-6 for at, _ in read_at), "the end shows all that is left"
        assert [update.finish for _, update in seen if update.finish] == ([FINISH] if end == "end" else [])
        assert all(update.tokens or update.finish for _, update in seen), "an update says something"

    on_made_up_time(test)


@given(EVENTS, st.lists(GAPS, min_size=1, max_size=6))
def test_a_reader_who_gives_up_waiting_takes_nothing_with_it(
    events: list[tuple[float, int]], patience: list[float]
) -> None:
    """Every wait may be cut short; what was not handed out is still there for the next."""

    async def test(loop: MadeUpTime) -> None:
        mailbox = Mailbox("r", loop)
        mailbox.keep(Pace(0.04, 3))
        tokens: list[int] = []

        async def impatient() -> None:
            turn = 0
            while True:
                waiting = loop.create_task(mailbox.take())
                await asyncio.wait((waiting,), timeout=patience[turn % len(patience)] + 0.001)
                waiting.cancel()
                update = (await asyncio.gather(waiting, return_exceptions=True))[0]
                turn += 1
                if update is None:
                    return
                if isinstance(update, Update):
                    tokens.extend(update.tokens)

        reading = loop.create_task(impatient())
        made = 0
        for after_s, count in events:
            await asyncio.sleep(after_s)
            mailbox.put(tuple(range(made, made + count)), ())
            made += count
        mailbox.end(FINISH)
        await reading
        assert tokens == list(range(made))
        assert loop.timers(mailbox) == 0

    on_made_up_time(test)


# A real engine, streams under a promise ------------------------------------------------------------------------------

PACED: dict[str, Any] = {
    "policy": "slo",
    "num_blocks": 64,
    "block_size": 4,
    "max_num_seqs": 24,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
}


def promised(index: int, rng: random.Random) -> RequestSpec:
    """A request whose gaps are promised, of 1 to 30 tokens."""
    prompt, max_tokens = tuple(rng.choices(range(50), k=rng.randint(1, 60))), rng.randint(1, 30)
    return RequestSpec(
        f"r{index}",
        prompt,
        spec("x", max_tokens=max_tokens, logprobs=1 if rng.random() < 0.5 else None).sampling,
        itl_s=rng.choice([1e-310, 0.001, 0.02, 0.2, 30.0]),
    )


async def paced_life(client: EngineClient, rng: random.Random, request: RequestSpec) -> str:
    """How it ended: read, cancelled, closed, dropped, dead."""
    want = expected_output(request.prompt, request.sampling.max_tokens)
    way, after, slow_s = (
        rng.choice(["read", "read", "cancel", "close", "drop"]),
        rng.randint(0, 10),
        rng.random() * 0.01,
    )
    tokens: tuple[int, ...] = ()
    finish = None
    try:
        stream = await client.submit(request)
        async for update in stream:
            assert finish is None
            tokens, finish = tokens + update.tokens, update.finish
            scored = request.sampling.logprobs is not None
            assert [one.token for one in update.logprobs] == (list(update.tokens) if scored else [])
            assert tokens == want[: len(tokens)]
            if len(tokens) >= after:
                if way == "cancel":
                    stream.cancel()
                elif way == "close":
                    await stream.aclose()
                elif way == "drop":
                    return way
            await asyncio.sleep(slow_s)
    except EngineDead:
        return "dead"
    if finish is not None and finish.reason is FinishReason.ERROR:
        return "dead"
    if way == "read":
        assert tokens == want, "the end shows all"
    assert finish is not None or way == "close"
    return way


@pytest.mark.parametrize("what", [None, "raise", "exit"])
def test_paced_streams_of_an_engine_that_lives_or_dies(what: str | None) -> None:
    async def test() -> None:
        rng = random.Random(str(what))
        config: dict[str, Any] = {"scheduler": PACED, "delay_s": 0.001} | (
            {"what": what, "at_step": 60} if what else {}
        )
        async with asyncio.timeout(30):
            async with EngineClient(launch(**config)) as client:
                lives = [paced_life(client, rng, promised(index, rng)) for index in range(120)]
                ends = await asyncio.gather(*lives)
                assert ("dead" in ends) == bool(what)
                gc.collect()  # the client is left as soon as the last stream has ended, however its engine is doing
                while client.live_requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            gc.collect()
            held = [
                handle
                for handle in asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
                if not handle.cancelled() and isinstance(getattr(handle._callback, "__self__", None), Mailbox)
            ]
            assert held == []

    asyncio.run(test())
