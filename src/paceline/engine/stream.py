"""What has come for one request and was not read yet.

The client drops tokens into a `Mailbox` and never waits for a reader; the reader takes all that is there at once. A
slow reader therefore holds up nobody, and what piles up is bounded by its own request's max_tokens. Where the scheduler
set a pace, a reader gets no token before that shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

import msgspec

from paceline.core.pace import Pace, Pacer
from paceline.core.step import Finish, FinishReason, TokenLogprob
from paceline.errors import EngineDead


class Update(msgspec.Struct, frozen=True):
    """What came since the last one. `logprobs` is parallel to `tokens`, or () where none were asked for."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in order; of the prompt tokens after the first
    finish: Finish | None = None  # set on the last Update alone


class Mailbox:
    """One request on the client's side. Not for other threads than the event loop's."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.admitted: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._tokens: list[int] = []  # shown and not read yet, then those held back
        self._logprobs: list[TokenLogprob] = []  # parallel to `_tokens`, or empty where none were asked for
        self._pacer: Pacer | None = None
        self._timer: asyncio.TimerHandle | None = None  # until the next of those held is shown
        self._prompt_logprobs: list[TokenLogprob] = []
        self._finish: Finish | None = None
        self._failure: str | None = None
        self._closed = False  # nothing more will come, or nobody wants it
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the request still runs and somebody wants its tokens."""
        return not self._closed

    def keep(self, pace: Pace | None) -> None:
        """Show tokens at this pace; None: as they come."""
        self._pacer = None if pace is None else Pacer(pace)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def put(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """New tokens."""
        if self._closed:
            return
        self._tokens += tokens
        self._logprobs += logprobs
        if self._pacer is None or self._pacer.add(self._loop.time(), len(tokens)):
            self._wake()
        self._set_timer()

    def put_prompt_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """The next part of the prompt's logprobs."""
        if not self._closed:
            self._prompt_logprobs += logprobs
            self._wake()

    def end(self, finish: Finish) -> None:
        """The terminal event; the reader gets it with whatever tokens are left."""
        if not self._closed:
            self._closed = True
            self._finish = finish
            self.keep(None)  # all that is left is shown
            self._wake()

    def fail(self, message: str) -> None:
        """The engine died: the reader gets what is left, then EngineDead."""
        if not self.admitted.done():
            self.admitted.set_exception(EngineDead(message))
        if not self._closed:
            self._closed = True
            self._failure = message
            self.keep(None)
            self._wake()

    def discard(self) -> None:
        """Nobody will read this any more."""
        self._closed = True
        self.keep(None)
        self._finish = None
        self._failure = None
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
        self._wake()

    async def take(self) -> Update | None:
        """All that has come, waiting if that is nothing; None after the end. Raises EngineDead."""
        if self._reader is not None:
            raise RuntimeError(f"stream {self.request_id} is being read already")
        while not (self._shown or self._prompt_logprobs or self._finish):
            if self._failure is not None:
                raise EngineDead(self._failure)
            if self._closed:
                return None
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        count = self._shown
        tokens, logprobs = tuple(self._tokens[:count]), tuple(self._logprobs[:count])
        update = Update(tokens, logprobs, tuple(self._prompt_logprobs), self._finish)
        del self._tokens[:count], self._logprobs[:count]
        self._prompt_logprobs.clear()
        self._finish = None
        return update

    @property
    def _shown(self) -> int:
        """Tokens that may be read."""
        return len(self._tokens) - (self._pacer.held if self._pacer is not None else 0)

    def _set_timer(self) -> None:
        next_s = self._pacer.next_s if self._pacer is not None else None
        if next_s is not None and self._timer is None:
            self._timer = self._loop.call_at(next_s, self._show)

    def _show(self) -> None:
        """Time has passed: what is due is shown. Tokens that came meanwhile may have put it off."""
        self._timer = None
        if self._pacer is not None and self._pacer.advance(self._loop.time()):
            self._wake()
        self._set_timer()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Stream:
    """The reader's end of one request: an async iterator of `Update`, the last of which has `finish`.

    One reader at a time. A stream that is closed, forgotten, or whose reading task is cancelled cancels its request;
    its blocks are free at the engine's next step. Raises EngineDead when the engine dies before the request ended.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        cancel: Callable[[str, FinishReason], None],
        abandon: Callable[[Mailbox], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._mailbox = mailbox
        self._cancel = cancel
        self._abandon = abandon
        self._loop = loop

    @property
    def request_id(self) -> str:
        """The id its spec was submitted with."""
        return self._mailbox.request_id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update:
        try:
            update = await self._mailbox.take()
        except asyncio.CancelledError:
            self._abandon(self._mailbox)
            raise
        if update is None:
            raise StopAsyncIteration
        return update

    async def collect(self) -> Update:
        """Read to the end; everything that was not read yet as one Update."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        prompt_logprobs: list[TokenLogprob] = []
        finish: Finish | None = None
        async for update in self:
            tokens += update.tokens
            logprobs += update.logprobs
            prompt_logprobs += update.prompt_logprobs
            finish = update.finish
        return Update(tuple(tokens), tuple(logprobs), tuple(prompt_logprobs), finish)

    def cancel(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request early and go on reading: the last Update says `reason`, unless it had ended before."""
        if self._mailbox.is_open:
            self._cancel(self.request_id, reason)

    async def aclose(self) -> None:
        """Stop reading; the request is cancelled if it still runs."""
        self._abandon(self._mailbox)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._mailbox.is_open:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and the engine with it
                # Collection may happen on any thread and inside any call.
                self._loop.call_soon_threadsafe(self._abandon, self._mailbox)
