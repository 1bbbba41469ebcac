"""What a reader gets of its mailbox: everything once, in order, and under a pace nothing before its time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from paceline.core.pace import Pace
from paceline.core.step import Finish, FinishReason, Rejected, RejectReason, TokenLogprob
from paceline.engine.client import rejection
from paceline.engine.stream import Mailbox
from paceline.errors import BadRequest, EngineDead, Overloaded

PACE = Pace(interval_s=0.04, hold=3)
FINISH = Finish("r", FinishReason.LENGTH)


def with_mailbox(test: Callable[[Mailbox], Awaitable[None]], pace: Pace | None = PACE) -> None:
    async def run() -> None:
        mailbox = Mailbox("r", asyncio.get_running_loop())
        mailbox.keep(pace)
        await asyncio.wait_for(test(mailbox), 30.0)

    asyncio.run(run())


async def read_all(mailbox: Mailbox) -> list[tuple[float, tuple[int, ...]]]:
    """(when, tokens) of each update."""
    found = []
    while (update := await mailbox.take()) is not None:
        found.append((asyncio.get_running_loop().time(), update.tokens))
    return found


def test_tokens_made_at_once_are_shown_one_by_one() -> None:
    async def test(mailbox: Mailbox) -> None:
        reading = asyncio.ensure_future(read_all(mailbox))
        for token in range(4):
            mailbox.put((token,), ())
        await asyncio.sleep(1.0)
        assert not reading.done()
        mailbox.put((4,), ())
        mailbox.end(FINISH)
        updates = await reading
        assert [token for _, tokens in updates for token in tokens] == [0, 1, 2, 3, 4]
        assert [tokens for _, tokens in updates][:4] == [(0,), (1,), (2,), (3,)]
        # A timer may be late on a busy machine, and the next one is then due sooner; none is early.
        begin_s = updates[0][0]
        assert all(at - begin_s >= PACE.interval_s * number - 0.002 for number, (at, _) in enumerate(updates[:4]))

    with_mailbox(test)


def test_the_end_shows_all_that_is_held() -> None:
    async def test(mailbox: Mailbox) -> None:
        for token in range(4):
            mailbox.put((token,), (TokenLogprob(token, -0.5, 1),))
        mailbox.end(FINISH)
        update = await mailbox.take()
        assert update is not None
        assert update.tokens == (0, 1, 2, 3)
        assert [one.token for one in update.logprobs] == [0, 1, 2, 3]
        assert update.finish == FINISH
        assert await mailbox.take() is None

    with_mailbox(test)


def test_logprobs_are_shown_with_their_tokens() -> None:
    async def test(mailbox: Mailbox) -> None:
        for token in range(4):
            mailbox.put((token,), (TokenLogprob(token, -0.5, 1),))
        for _ in range(4):
            update = await mailbox.take()
            assert update is not None
            assert [one.token for one in update.logprobs] == list(update.tokens)

    with_mailbox(test)


def test_a_dead_engine_shows_what_was_held_and_then_says_so() -> None:
    async def test(mailbox: Mailbox) -> None:
        mailbox.admitted.set_result(None)
        for token in range(4):
            mailbox.put((token,), ())
        mailbox.fail("it died")
        update = await mailbox.take()
        assert update is not None
        assert update.tokens == (0, 1, 2, 3)
        with pytest.raises(EngineDead, match="it died"):
            await mailbox.take()

    with_mailbox(test)


def test_nothing_is_shown_to_whoever_has_left() -> None:
    async def test(mailbox: Mailbox) -> None:
        for token in range(4):
            mailbox.put((token,), ())
        mailbox.discard()
        await asyncio.sleep(3 * PACE.interval_s)
        assert await mailbox.take() is None

    with_mailbox(test)


def test_a_slow_reader_gets_all_that_was_shown_meanwhile() -> None:
    async def test(mailbox: Mailbox) -> None:
        for token in range(4):
            mailbox.put((token,), ())
        await asyncio.sleep(1.0)
        update = await mailbox.take()
        assert update is not None
        assert update.tokens == (0, 1, 2, 3)

    with_mailbox(test)


def test_without_a_pace_tokens_are_shown_as_they_come() -> None:
    async def test(mailbox: Mailbox) -> None:
        reading = asyncio.ensure_future(read_all(mailbox))
        for token in range(20):
            mailbox.put((token,), ())
            await asyncio.sleep(0)
        mailbox.end(FINISH)
        updates = await reading
        assert [token for _, tokens in updates for token in tokens] == list(range(20))
        assert all(a <= b for (a, _), (b, _) in pairwise(updates))

    with_mailbox(test, pace=None)


@pytest.mark.parametrize("reason", RejectReason)
def test_a_refusal_that_time_cures_is_429_and_says_when_to_come_back(reason: RejectReason) -> None:
    error = rejection(Rejected("r", reason, "no", retry_after_s=2.5))
    if reason in (RejectReason.QUEUE_FULL, RejectReason.OVERLOADED):
        assert isinstance(error, Overloaded)
        assert error.status == 429
        assert error.retry_after_s == 2.5
    else:
        assert isinstance(error, BadRequest)
    assert error.code == reason.value
