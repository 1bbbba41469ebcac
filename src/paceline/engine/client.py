"""EngineClient: what a server or an embedding program holds of an engine in its own process.

async with EngineClient(EngineLaunch("package.module:factory", config)) as client:
    stream = await client.submit(spec)
    async for update in stream:
        ...
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from itertools import repeat
from types import TracebackType
from typing import TypeVar

from paceline.core.step import (
    Accepted,
    Finish,
    FinishReason,
    Rejected,
    RejectReason,
    RequestSpec,
    StepEvents,
    TokenLogprob,
)
from paceline.engine.messages import Alive, Answers, Cancel, EngineInfo, EngineStats, Report, Stage, StepDone, Submit
from paceline.engine.process import EngineLaunch
from paceline.engine.stream import Mailbox, Stream, Update
from paceline.engine.supervisor import EngineState, RestartPolicy, Supervisor
from paceline.errors import (
    BadRequest,
    EngineDead,
    EngineNotReady,
    Overloaded,
    PacelineError,
    RequestError,
)

__all__ = ["EngineClient", "EngineLaunch", "EngineState", "RestartPolicy", "Stream", "Update"]

log = logging.getLogger("paceline.engine")

_T = TypeVar("_T")
_RETRY_AFTER_S = 1.0  # where the scheduler names no time


class EngineClient:
    """Requests in, streams of updates out; the engine computes in a process of its own.

    Belongs to one event loop. `restart` True (or a RestartPolicy) starts an engine that died anew; requests that were
    running at its death end with EngineDead all the same. `on_stage` hears of the cold start's stages.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        *,
        restart: bool | RestartPolicy = False,
        on_stage: Callable[[Stage], None] | None = None,
    ) -> None:
        self.stats = EngineStats()
        self._mailboxes: dict[str, Mailbox] = {}  # of every request without a Finish
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._stats_listeners: list[Callable[[EngineStats], None]] = []
        self._state_listeners: list[Callable[[EngineState], None]] = []
        self._death: str | None = None
        self._supervisor = Supervisor(
            launch,
            RestartPolicy() if restart is True else restart or None,
            on_report=self._hear,
            on_death=self._bury,
            on_state=lambda state: _tell(self._state_listeners, state),
            on_stage=lambda stage: _tell([on_stage] if on_stage is not None else [], stage),
        )

    # Life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the engine; returns when it is ready.

        Raises the PacelineError that kept it from starting (ConfigError, ModelError, ...), or EngineDead. If the
        waiting task is cancelled, the engine is killed.
        """
        return await self._supervisor.start()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new requests, let the accepted ones finish, then stop the engine.

        What still runs after `timeout_s` ends with ABORT. It does not wait for readers: unread updates stay readable.
        """
        self._supervisor.begin_draining()
        if self.state is EngineState.DRAINING:
            try:
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
            except TimeoutError:
                log.warning("%d requests still run at the end of draining", len(self._mailboxes))
        await self.close()

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop the engine now: live requests end with ABORT. After `timeout_s` it is killed. Idempotent."""
        await self._supervisor.close(timeout_s)

    async def wait_dead(self) -> PacelineError | None:
        """Wait until the engine is dead for good: the reason, or None if it was stopped on purpose."""
        return await self._supervisor.wait_dead()

    async def __aenter__(self) -> EngineClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Requests --------------------------------------------------------------------------------------------------------

    async def submit(self, spec: RequestSpec) -> Stream:
        """Hand a request to the engine; returns once it was accepted.

        Raises Overloaded or BadRequest when the scheduler rejects it, EngineNotReady while starting or draining,
        EngineDead. Cancelling the waiting task cancels the request.
        """
        self._require_ready()
        if spec.request_id in self._mailboxes:
            raise BadRequest(f"request id {spec.request_id!r} is already in use", code=RejectReason.DUPLICATE_ID.value)
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(spec.request_id, loop)
        self._supervisor.send(Submit(spec))
        self._mailboxes[spec.request_id] = mailbox
        self._all_ended.clear()
        try:
            await mailbox.admitted
        except asyncio.CancelledError:
            self._abandon(mailbox)
            raise
        return Stream(mailbox, self.cancel, self._abandon, loop)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request; its stream's last Update says `reason`. Unknown or ended: nothing happens."""
        if request_id in self._mailboxes:
            self._supervisor.send(Cancel(request_id, reason))

    # What one can see ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """starting, ready, draining or dead."""
        return self._supervisor.state

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Raises EngineNotReady before it was ready once."""
        if self._supervisor.info is None:
            raise EngineNotReady("the engine is still starting")
        return self._supervisor.info

    @property
    def pid(self) -> int | None:
        """The engine process's id, while one lives."""
        return self._supervisor.pid

    @property
    def restarts(self) -> int:
        """How often the engine was started anew."""
        return self._supervisor.restarts

    @property
    def live_requests(self) -> int:
        """Requests submitted and not yet ended."""
        return len(self._mailboxes)

    @property
    def last_seen_s(self) -> float:
        """Seconds since the engine last said anything; infinite before its first word.

        Idle, it speaks once a second; busy, after each step. Much more than the longest step means that it hangs.
        """
        last = self._supervisor.last_report_s
        return math.inf if last is None else asyncio.get_running_loop().time() - last

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Called with the stats of every step (`last_step` set) and heartbeat (`last_step` None), on the event loop."""
        self._stats_listeners.append(listener)

    def add_state_listener(self, listener: Callable[[EngineState], None]) -> None:
        """Called with each new state, on the event loop."""
        self._state_listeners.append(listener)

    # Reports ---------------------------------------------------------------------------------------------------------

    def _hear(self, report: Report) -> None:
        match report:
            case StepDone(events, stats):
                self._deliver(events)
                self._note_stats(stats)
            case Answers(accepted, rejected, finished):
                for taken in accepted:
                    self._admit(taken)
                for answer in rejected:
                    self._reject(answer)
                for finish in finished:
                    self._end(finish)
            case Alive(stats):
                self._note_stats(stats)

    def _deliver(self, events: StepEvents) -> None:
        mailboxes = self._mailboxes
        for request_id, prompt_logprobs in events.prompt_logprobs:
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.put_prompt_logprobs(prompt_logprobs)
        none: tuple[TokenLogprob, ...] = ()
        for request_id, tokens, logprobs in zip(
            events.ids, events.tokens, events.logprobs or repeat(none), strict=False
        ):
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.put(tokens, logprobs)
        for finish in events.finished:
            self._end(finish)

    def _admit(self, answer: Accepted) -> None:
        mailbox = self._mailboxes.get(answer.request_id)
        if mailbox is not None and not mailbox.admitted.done():
            mailbox.keep(answer.pace)
            mailbox.admitted.set_result(None)

    def _reject(self, answer: Rejected) -> None:
        mailbox = self._forget(answer.request_id)
        if mailbox is not None and not mailbox.admitted.done():
            mailbox.admitted.set_exception(rejection(answer))

    def _end(self, finish: Finish) -> None:
        mailbox = self._forget(finish.request_id)
        if mailbox is not None:
            mailbox.end(finish)

    def _forget(self, request_id: str) -> Mailbox | None:
        mailbox = self._mailboxes.pop(request_id, None)
        if not self._mailboxes:
            self._all_ended.set()
        return mailbox

    def _abandon(self, mailbox: Mailbox) -> None:
        """Nobody reads this any more. It stays known until the engine has confirmed the end."""
        if mailbox.is_open:
            self.cancel(mailbox.request_id)
        mailbox.discard()

    def _bury(self, error: PacelineError) -> None:
        """The engine died: every request ends with that."""
        self._death = str(error)
        for mailbox in self._mailboxes.values():
            mailbox.fail(self._death)
        self._mailboxes.clear()
        self._all_ended.set()

    def _note_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        _tell(self._stats_listeners, stats)

    def _require_ready(self) -> None:
        match self.state:
            case EngineState.STARTING:
                restarting = f" anew after this: {self._death}" if self._death else ""
                raise EngineNotReady(f"the engine is starting{restarting}")
            case EngineState.DRAINING:
                raise EngineNotReady("the engine is draining and takes no new requests")
            case EngineState.DEAD:
                raise EngineDead(self._death or "the engine was stopped")


def rejection(answer: Rejected) -> RequestError:
    """What the caller of a refused request is told."""
    if answer.reason in (RejectReason.QUEUE_FULL, RejectReason.OVERLOADED):
        retry_after_s = _RETRY_AFTER_S if answer.retry_after_s is None else answer.retry_after_s
        return Overloaded(answer.message, retry_after_s=retry_after_s, code=answer.reason.value)
    return BadRequest(answer.message, code=answer.reason.value)


def _tell(listeners: list[Callable[[_T], None]], value: _T) -> None:
    """A listener that fails is not the engine's problem."""
    for listener in listeners:
        try:
            listener(value)
        except Exception:
            log.exception("a listener failed")
