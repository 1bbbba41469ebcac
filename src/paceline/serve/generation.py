"""Runs the jobs of one HTTP request and merges what the engine says about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from paceline.core.step import Finish, FinishReason, TokenLogprob
from paceline.engine.stream import Update
from paceline.errors import EngineDead, EngineError, EngineNotReady, Overloaded
from paceline.serve.attainment import Attainment
from paceline.serve.engine_port import Engine, TokenStream
from paceline.serve.metrics import ServeMetrics
from paceline.serve.prepare import Job
from paceline.text.stream import Piece
from paceline.text.tokenizer import Tokenizer


class GenerationFailed(EngineError):
    """The engine ended one request with an error and goes on with the others."""


class Ending(msgspec.Struct, frozen=True):
    """How a choice ended."""

    reason: str  # "stop" or "length"
    stop: str | int | None  # the stop string or the client's stop token id that ended it
    cached_tokens: int


class ChoiceEvent(msgspec.Struct, frozen=True):
    """News of one choice. The last event of a choice has `ending`."""

    choice: Choice
    piece: Piece
    ending: Ending | None = None


class Choice:
    """One job on its way: its stream, its text so far and its times."""

    def __init__(
        self,
        job: Job,
        stream: TokenStream,
        tokenizer: Tokenizer,
        metrics: ServeMetrics,
        began: float,
        attainment: Attainment,
    ) -> None:
        """`began`: when the HTTP request came, on the clock of `time.monotonic`."""
        self.job = job
        self.prompt_logprobs: list[TokenLogprob] = []
        self._stream = stream
        self._text = job.text_stream(tokenizer)
        self._metrics = metrics
        self._began = began
        self._outcome = attainment.outcome(job.spec.traffic_class)
        self._last_token: float | None = None
        self._ended = False

    @property
    def used(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self.job.discard else self._text.used

    async def events(self) -> AsyncIterator[ChoiceEvent]:
        """Everything about this choice, in order. Raises EngineError."""
        async for update in self._stream:
            event = self._take(update)
            if event is not None:
                yield event
            if update.finish is not None:
                return
        raise EngineDead(f"request {self.job.spec.request_id} ended without a finish")

    async def aclose(self, *, lost: bool) -> None:
        """Let go of the stream; cancels the request if it still runs. `lost`: it cannot, since the engine died."""
        if not self._ended:
            self._metrics.note_cut_off(lost=lost)
            if lost:
                self._metrics.note_outcome(self.job.spec.traffic_class, good=False)
        await self._stream.aclose()

    def _take(self, update: Update) -> ChoiceEvent | None:
        self._ended = update.finish is not None
        self._time(update)
        self.prompt_logprobs += update.prompt_logprobs
        finish = update.finish
        piece = Piece("", ())
        if not self.job.discard:
            by_token = finish is not None and finish.reason is FinishReason.STOP
            piece = self._text.push(
                update.tokens, update.logprobs, stop_token=finish.stop_token if finish and by_token else None
            )
        if finish is None:
            if self._text.stop_string is not None:
                # Its blocks are freed at the next step; the stream then says so, with the counters of the request.
                self._stream.cancel(FinishReason.STOP)
            return ChoiceEvent(self, piece) if piece.text or piece.tokens else None
        if not self.job.discard:
            rest = self._text.finish()
            piece = Piece(piece.text + rest.text, piece.tokens + rest.tokens)
        return ChoiceEvent(self, piece, self._end(finish))

    def _end(self, finish: Finish) -> Ending:
        stop_string = self._text.stop_string
        if stop_string is None:
            self._raise_if_failed(finish)
        reason = "stop" if stop_string is not None or finish.reason is FinishReason.STOP else "length"
        if self.job.discard:
            reason = "length"
        self._metrics.note_finish(finish, self.job.spec, self._text.used, reason)
        now = time.monotonic()
        self._metrics.e2e.observe(now - self._began)
        self._outcome.note("e2e", now, now - self._began, self.job.spec.e2e_s)
        self._metrics.note_outcome(self.job.spec.traffic_class, good=self._outcome.kept)
        stop: str | int | None = stop_string
        if stop is None and finish.stop_token in self.job.stop_token_ids:
            stop = finish.stop_token
        return Ending(reason, stop, finish.cached_tokens)

    def _raise_if_failed(self, finish: Finish) -> None:
        if finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._metrics.note_outcome(self.job.spec.traffic_class, good=False)
        if finish.reason is FinishReason.ERROR:
            self._metrics.note_finish(finish, self.job.spec, self._text.used, "error")
            raise GenerationFailed(finish.message or "the engine failed on this request")
        if finish.reason is FinishReason.ABORT:
            self._metrics.note_finish(finish, self.job.spec, self._text.used, "abort")
            raise EngineNotReady("the server is stopping and ended this request; send it again elsewhere")

    def _time(self, update: Update) -> None:
        """Time to the first token, and between tokens; several read at once share the time evenly."""
        if not update.tokens:
            return
        now = time.monotonic()
        count = len(update.tokens)
        if self._last_token is None:
            self._metrics.ttft.observe(now - self._began)
            self._outcome.note("ttft", now, now - self._began, self.job.spec.ttft_s)
            count -= 1
        else:
            gap = (now - self._last_token) / count
            for _ in range(count):
                self._metrics.itl.observe(gap)
                self._outcome.note("itl", now, gap, self.job.spec.itl_s)
        self._last_token = now


class Generation:
    """All choices of one HTTP request. Leaving the context cancels whatever still runs.

    async with Generation(...) as generation:
        async for event in generation.events(): ...
    """

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        tokenizer: Tokenizer,
        metrics: ServeMetrics,
        began: float,
        attainment: Attainment,
    ) -> None:
        self.jobs = jobs
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._began = began
        self._attainment = attainment
        self.choices: list[Choice] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        """Submit every job. If one is refused none runs; raises what the engine raised."""
        submits = [asyncio.ensure_future(self._engine.submit(job.spec)) for job in self.jobs]
        try:
            await asyncio.wait(submits)
        except asyncio.CancelledError:
            await self._take_back(submits)
            raise
        errors = [error for submit in submits if (error := submit.exception()) is not None]
        if errors:
            await self._take_back(submits)
            if isinstance(errors[0], (Overloaded, EngineError)):
                for job in self.jobs:
                    self._metrics.note_outcome(job.spec.traffic_class, good=False)
            raise errors[0]
        self.choices = [
            Choice(job, submit.result(), self._tokenizer, self._metrics, self._began, self._attainment)
            for job, submit in zip(self.jobs, submits, strict=True)
        ]
        return self

    @staticmethod
    async def _take_back(submits: Sequence[asyncio.Future[TokenStream]]) -> None:
        for submit in submits:
            submit.cancel()
        await asyncio.wait(submits)
        for submit in submits:
            if not submit.cancelled() and submit.exception() is None:
                await submit.result().aclose()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        for choice in self.choices:
            await choice.aclose(lost=isinstance(error, EngineDead))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum({job.prompt_index: len(job.spec.prompt) for job in self.jobs}.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(choice.used for choice in self.choices)

    def usage(self, endings: Mapping[int, Ending]) -> dict[str, Any]:
        """The usage object so far. Cached tokens are those of each prompt's first choice: a prompt is counted once."""
        firsts: dict[int, int] = {}
        for job in self.jobs:
            firsts.setdefault(job.prompt_index, job.index)
        cached = sum(endings[index].cached_tokens for index in firsts.values() if index in endings)
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def events(self) -> AsyncIterator[ChoiceEvent]:
        """News of all choices as it comes, each choice's in order; ends when all have ended. Raises EngineError."""
        return self.choices[0].events() if len(self.choices) == 1 else self._merged()

    async def _merged(self) -> AsyncIterator[ChoiceEvent]:
        # One slot: while the reader is busy the pumps wait, and the engine's streams coalesce behind them.
        queue: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(maxsize=1)
        self._pumps = [asyncio.create_task(_pump(choice, queue)) for choice in self.choices]
        running = len(self._pumps)
        while running:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            running -= news.ending is not None
            yield news


async def _pump(choice: Choice, queue: asyncio.Queue[ChoiceEvent | Exception]) -> None:
    try:
        async for event in choice.events():
            await queue.put(event)
    except Exception as error:
        await queue.put(error)
