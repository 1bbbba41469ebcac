"""One line of a batch, answered as if it had come over HTTP: the same checks, the same answer, the same errors.

What HTTP tells a client to do about a 429 or a 503, this does itself: wait and try again. A line during which the
engine died or failed is tried again too, but apart from others under the same suspicion, and not for ever: one that
kills the engine each time must not keep a whole batch, or a server, from going on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from paceline.core.classes import BATCH
from paceline.engine.messages import EngineStats
from paceline.engine.supervisor import EngineState
from paceline.errors import BadRequest, EngineDead, EngineNotReady, Overloaded
from paceline.serve import logs
from paceline.serve.answering import Answer, prepare_answer
from paceline.serve.batch.lines import Line
from paceline.serve.chat import ChatAnswer
from paceline.serve.completions import CompletionAnswer
from paceline.serve.context import ServerContext
from paceline.serve.exchange import describe_error
from paceline.serve.fields import CHAT_OFF, COMPLETION_OFF
from paceline.serve.generation import GenerationFailed
from paceline.serve.keys import Caller
from paceline.serve.schemas import ChatRequest, CompletionRequest, Sampling
from paceline.serve.traffic import Traffic, resolve_traffic

log = logging.getLogger("paceline.serve")

MOST_STRIKES = 3  # deaths and failures of the engine during one line, before the line counts as the cause
_MOST_PAUSE_S = 30.0
_POLL_S = 0.1  # for an engine that starts anew
_HEARTBEAT_S = 1.0  # an engine that is idle speaks so often


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a line's `url` stands for."""

    body: type[Any]
    off: Mapping[str, tuple[Any, ...]]
    answer: type[Answer[Any]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, CHAT_OFF, ChatAnswer),
    "/v1/completions": Endpoint(CompletionRequest, COMPLETION_OFF, CompletionAnswer),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a line ended: what HTTP would have answered."""

    status: int
    request_id: str
    body: dict[str, Any]


class Runner:
    """Answers lines with the engine of `context`. Belongs to its event loop."""

    def __init__(self, context: ServerContext, *, most_waiting: int | None = None) -> None:
        """`most_waiting`: hand the engine nothing while so many requests wait there. What it can take at once it gets,
        and a queue that others stand in is not made longer. None: no such limit."""
        self._context = context
        self._most_waiting = most_waiting
        self._waiting = 0  # in the engine, as far as we know: its last word and what we handed it since
        self._stepped = asyncio.Event()
        self._door = asyncio.Lock()  # whoever comes first is let in first
        self._alone = asyncio.Lock()
        if most_waiting is not None:
            context.engine.add_stats_listener(self._hear)

    async def ready(self) -> None:
        """Wait until the engine takes requests. Raises EngineDead and EngineNotReady when it never will again."""
        while (state := self._context.engine.state) is not EngineState.READY:
            if state is EngineState.DEAD:
                raise EngineDead("the engine is dead")
            self._refuse_draining(state)
            await asyncio.sleep(_POLL_S)
        self._refuse_draining(state)

    async def answer(self, line: Line, caller: Caller, strikes: int, on_strike: Callable[[], None]) -> Outcome:
        """What the line is answered. `strikes`: how often the engine has died or failed during it; `on_strike` hears of
        one more.

        Raises EngineDead and EngineNotReady when the engine is gone for good, which says nothing about the line.
        """
        request_id = f"req-{secrets.token_hex(12)}"
        token = logs.request_id.set(request_id)
        refusals = 0
        try:
            while True:
                await self.ready()
                try:
                    async with self._apart(suspect=strikes > 0):
                        return Outcome(200, request_id, await self._once(line, caller))
                except Overloaded as error:
                    await asyncio.sleep(min(error.retry_after_s * 2.0**refusals, _MOST_PAUSE_S))
                    refusals = min(refusals + 1, 8)
                except (EngineDead, GenerationFailed) as error:
                    strikes += 1
                    on_strike()
                    log.warning("the engine failed %d times during line %d of a batch: %s", strikes, line.number, error)
                    if strikes >= MOST_STRIKES:
                        return _failed(error, request_id)
                except EngineNotReady:
                    await asyncio.sleep(_POLL_S)
                except Exception as error:
                    outcome = _failed(error, request_id)
                    if outcome.status == 500:
                        log.exception("a line of a batch failed")
                    return outcome
        finally:
            logs.request_id.reset(token)

    async def _once(self, line: Line, caller: Caller) -> dict[str, Any]:
        if line.body.get("stream"):
            raise BadRequest("a batch's answers are whole: leave out stream", param="stream")
        began = time.monotonic()
        endpoint = ENDPOINTS[line.url]
        _, answer, generation = await prepare_answer(
            self._context, line.body, endpoint.body, endpoint.off, endpoint.answer, caller, began, batch_traffic
        )
        await self._wait_for_room(len(generation.jobs))
        async with generation:
            return await answer.whole(generation)

    @asynccontextmanager
    async def _apart(self, *, suspect: bool) -> AsyncIterator[None]:
        """One suspect at a time: the next failure clears the others."""
        if not suspect:
            yield
            return
        async with self._alone:
            yield

    async def _wait_for_room(self, choices: int) -> None:
        if self._most_waiting is None:
            return
        async with self._door:
            while self._waiting >= self._most_waiting:
                self._stepped.clear()
                try:
                    await asyncio.wait_for(self._stepped.wait(), _HEARTBEAT_S)
                except TimeoutError:  # what we handed it was refused, and no step came of it
                    self._waiting = self._context.engine.stats.scheduler.num_waiting
            self._waiting += choices

    def _hear(self, stats: EngineStats) -> None:
        self._waiting = stats.scheduler.num_waiting
        self._stepped.set()

    def _refuse_draining(self, state: EngineState) -> None:
        if self._context.draining or state is EngineState.DRAINING:
            raise EngineNotReady("the server is stopping")


def batch_traffic(context: ServerContext, body: Sampling, caller: Caller) -> Traffic:
    """Class `batch`, whichever class requests have by default. Raises BadRequest if the body names another."""
    settings = context.settings
    traffic = resolve_traffic(body.service_tier, body.paceline, caller, settings.classes, BATCH.name)
    if traffic.kind.name != BATCH.name:
        by_tier = body.paceline is None or body.paceline.traffic_class is None
        param = "service_tier" if by_tier else "paceline.class"
        raise BadRequest(
            f"requests of a batch are of class {BATCH.name!r}, not {traffic.kind.name!r}: leave out {param}",
            param=param,
        )
    return traffic


def _failed(error: Exception, request_id: str) -> Outcome:
    status, body, _ = describe_error(error)
    return Outcome(status, request_id, body)
