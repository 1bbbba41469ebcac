"""An engine in this process: the real scheduler, loop and streams over a backend that says what a test scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.config import SchedulerConfig
from paceline.core.scheduler import Scheduler
from paceline.core.step import (
    Finish,
    FinishReason,
    Rejected,
    RejectReason,
    RequestSpec,
    StepEvents,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from paceline.engine.loop import EngineLoop, StepFailed
from paceline.engine.messages import EngineInfo, EngineStats
from paceline.engine.stream import Mailbox, Stream
from paceline.engine.supervisor import EngineState
from paceline.errors import BadRequest, EngineDead, EngineNotReady, Overloaded, PacelineError

VOCAB = 49152
EOS = 2
Script = Callable[[RequestSpec], Sequence[int]]


class ScriptedBackend:
    """Says `script(spec)`, token by token, then EOS for ever (unless the request ignores it: then token 88)."""

    def __init__(self) -> None:
        self.script: Script = lambda spec: (88,) * 4
        self.fail: Callable[[StepPlan], None] = lambda plan: None
        self.specs: dict[str, RequestSpec] = {}
        self.said: dict[str, int] = {}
        self.seen: list[RequestSpec] = []  # every spec ever admitted

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.specs[request_id], self.said[request_id]
        for admission in plan.admitted:
            spec = admission.spec
            self.specs[spec.request_id] = spec
            self.said[spec.request_id] = len(admission.outputs)
            self.seen.append(spec)
        self.fail(plan)
        rows = range(len(plan.ids))
        tokens = tuple(self._say(plan.ids[row]) if plan.samples[row] else () for row in rows)
        return StepResult(
            plan.step,
            tokens,
            logprobs=self._logprobs(plan, tokens),
            prompt_logprobs=self._prompt_logprobs(plan),
            seconds=0.001,
        )

    def _say(self, request_id: str) -> tuple[int, ...]:
        spec = self.specs[request_id]
        script = self.script(spec)
        said = self.said[request_id]
        self.said[request_id] += 1
        if said < len(script):
            return (script[said],)
        return (EOS if EOS in spec.sampling.stop_token_ids else 88,)

    def _logprobs(self, plan: StepPlan, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[TokenLogprob, ...], ...]:
        tops = [self.specs[i].sampling.logprobs for i in plan.ids]
        if all(top is None for top in tops):
            return ()
        return tuple(
            tuple(scored(token, top) for token in row) if top is not None else ()
            for row, top in zip(tokens, tops, strict=True)
        )

    def _prompt_logprobs(self, plan: StepPlan) -> tuple[tuple[TokenLogprob, ...], ...]:
        tops = [self.specs[i].sampling.prompt_logprobs for i in plan.ids]
        if all(top is None for top in tops):
            return ()
        rows = []
        for request_id, start, count, top in zip(plan.ids, plan.starts, plan.counts, tops, strict=True):
            prompt = self.specs[request_id].prompt
            scored_tokens = prompt[start + 1 : start + count + 1] if top is not None else ()
            rows.append(tuple(scored(token, top or 0) for token in scored_tokens))
        return tuple(rows)


def scored(token: int, top: int) -> TokenLogprob:
    others = tuple((token + i, -0.25 - i) for i in range(top))
    return TokenLogprob(token, -0.25, 1, others)


class FakeEngine:
    """`paceline.serve.engine_port.Engine` without a process. Knobs are plain attributes; `die()` kills it."""

    def __init__(self, vocab: int = VOCAB, **scheduler: Any) -> None:
        settings: dict[str, Any] = {"num_blocks": 512, "max_model_len": 2048, **scheduler}
        self.backend = ScriptedBackend()
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.loop = EngineLoop(self.scheduler, self.backend, debug=True)
        self.stats = EngineStats()
        self.state = EngineState.STARTING
        self.last_seen_s = 0.0
        self.step_s = 0.0  # pause before each step
        self.paused = False
        self.reject: Rejected | None = None  # what the next submits are told
        self.start_error: PacelineError | None = None
        self.may_start = asyncio.Event()  # set unless a test wants to see it starting
        self.may_start.set()
        self._info = EngineInfo(
            model="tiny-test",
            architecture="scripted",
            road="native",
            vocab_size=vocab,
            max_model_len=settings["max_model_len"],
            eos_token_ids=(EOS,),
            tokenizer_dir="",
            block_size=16,
            num_blocks=settings["num_blocks"],
            dtype="none",
            kv_dtype="none",
            device="cpu",
            weights_bytes=0,
            kv_bytes=0,
            namespace="0123456789abcdef",
        )
        self._mailboxes: dict[str, Mailbox] = {}
        self._listeners: list[Callable[[EngineStats], None]] = []
        self._work = asyncio.Event()
        self._dead: asyncio.Future[PacelineError | None] | None = None
        self._task: asyncio.Task[None] | None = None

    # The port ---------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        if self.state is EngineState.STARTING:
            raise EngineNotReady("the engine is still starting")
        return self._info

    async def start(self) -> EngineInfo:
        self._dead = asyncio.get_running_loop().create_future()
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        self.state = EngineState.READY
        self._task = asyncio.create_task(self._turn())
        return self._info

    async def submit(self, spec: RequestSpec) -> Stream:
        await asyncio.sleep(0)
        if self.state is EngineState.DEAD:
            raise EngineDead("the engine process was killed by SIGKILL")
        if self.state is not EngineState.READY:
            raise EngineNotReady(f"the engine is {self.state}")
        answer = self.reject or self.loop.submit(spec)
        if isinstance(answer, Rejected):
            if answer.reason is RejectReason.QUEUE_FULL:
                raise Overloaded(answer.message, retry_after_s=answer.retry_after_s or 1.0, code=answer.reason.value)
            raise BadRequest(answer.message, code=answer.reason.value)
        mailbox = self._mailboxes[spec.request_id] = Mailbox(spec.request_id, asyncio.get_running_loop())
        mailbox.admitted.set_result(None)
        self._work.set()
        return Stream(mailbox, self.cancel, self._abandon, asyncio.get_running_loop())

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if (finish := self.loop.cancel(request_id, reason)) is not None:
            self._end(finish)

    async def close(self, timeout_s: float = 10.0) -> None:
        for request_id in list(self._mailboxes):
            self.cancel(request_id)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.state = EngineState.DEAD
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)

    async def wait_dead(self) -> PacelineError | None:
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None:
        self._listeners.append(listener)

    # The inside -------------------------------------------------------------------------------------------------------

    def die(self, message: str = "the engine process was killed by SIGKILL") -> None:
        self.state = EngineState.DEAD
        if self._task is not None:
            self._task.cancel()
        for mailbox in self._mailboxes.values():
            mailbox.fail(message)
        self._mailboxes.clear()
        assert self._dead is not None
        self._dead.set_result(EngineDead(message))

    @property
    def held_blocks(self) -> int:
        return self.scheduler.stats().kv_blocks_used

    @property
    def live(self) -> int:
        return len(self.loop.live)

    def _abandon(self, mailbox: Mailbox) -> None:
        if mailbox.is_open:
            self.cancel(mailbox.request_id)
        mailbox.discard()

    def _end(self, finish: Finish) -> None:
        if (mailbox := self._mailboxes.pop(finish.request_id, None)) is not None:
            mailbox.end(finish)

    async def _turn(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self.loop.has_work:
                await asyncio.sleep(self.step_s)
                if self.paused:
                    continue
                try:
                    events = self.loop.step()
                except StepFailed as error:
                    self._deliver(error.events)
                    self.die(str(error))
                    return
                if events is not None:
                    self._deliver(events)

    def _deliver(self, events: StepEvents) -> None:
        for request_id, prompt_logprobs in events.prompt_logprobs:
            if (mailbox := self._mailboxes.get(request_id)) is not None:
                mailbox.put_prompt_logprobs(prompt_logprobs)
        logprobs = events.logprobs or ((),) * len(events.ids)
        for request_id, tokens, row in zip(events.ids, events.tokens, logprobs, strict=True):
            if (mailbox := self._mailboxes.get(request_id)) is not None:
                mailbox.put(tokens, row)
        for finish in events.finished:
            self._end(finish)
        self.stats = self.loop.stats(of_step=True)
        for listener in self._listeners:
            listener(self.stats)
