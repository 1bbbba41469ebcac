"""The one engine loop: plan, execute, commit.

`EngineLoop` drives a scheduler over a backend on a clock. A batch job in process, the engine process behind a server
and a simulation all turn this loop; only the backend and the clock differ. `step` never sleeps and owns no thread:
whoever calls it decides how to wait when there is nothing to run. A simulation of many engines calls its two halves,
`begin` and `complete`, because between them other engines live through the time that the step takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from paceline.core.protocols import Backend, Clock
from paceline.core.scheduler import Scheduler
from paceline.core.shape import shape_of
from paceline.core.step import (
    Accepted,
    Finish,
    FinishReason,
    Rejected,
    RequestSpec,
    StepEvents,
    StepPlan,
    StepResult,
)
from paceline.engine.messages import EngineStats, StepSample
from paceline.errors import EngineDead, EngineError

log = logging.getLogger("paceline.engine")

_COST_ERROR_EVERY = 32  # steps
_DUMP_LIMIT = 20  # requests listed in a state dump


class MonotonicClock:
    """Seconds of the machine's monotonic clock: comparable between the processes of one machine."""

    def now(self) -> float:
        return time.monotonic()


class RecoverableError(EngineError):
    """Raised by a backend whose step failed and which can go on.

    It promises that it applied the plan's `released` and `admitted` and that the KV of requests outside the plan is
    whole. The requests of the plan end with ERROR; the others live on. (Any exception with a true attribute
    `recoverable` counts.)
    """

    recoverable = True


class StepFailed(EngineError):
    """The engine cannot go on. Every live request has ended with ERROR: `events` tells, and must be passed on."""

    def __init__(self, message: str, events: StepEvents) -> None:
        super().__init__(message)
        self.events = events


class EngineStalled(StepFailed):
    """The scheduler has work and plans nothing, again and again: a bug, reported with a dump instead of silence."""


class EngineLoop:
    """Turns a scheduler over a backend.

    `stall_limit` consecutive fruitless polls of a scheduler with work are an error. With `debug`, the scheduler's
    integrity is checked after every step. Not thread-safe: one thread turns it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        clock: Clock | None = None,
        *,
        stall_limit: int = 100,
        debug: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self.clock: Clock = clock if clock is not None else MonotonicClock()
        self.stall_limit = stall_limit
        self.stalled_polls = 0  # fruitless polls since the last step
        self._debug = debug
        self._live: dict[str, tuple[RequestSpec, float]] = {}  # with the time of submission
        self._steps = 0
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._errors = 0
        self._near_boundary = 0
        self._cost_error: tuple[float, float] | None = None
        self._last_step: StepSample | None = None
        self._scheduler_s = 0.0  # real time that the newest plan, and its commit, took
        self._begun: tuple[StepPlan, float, StepResult | Exception] | None = None  # the step between its two halves
        self._broken: str | None = None  # why no step can follow

    @property
    def has_work(self) -> bool:
        """Whether `step` is worth calling."""
        return self.scheduler.has_work

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of accepted requests without a `Finish`, oldest first."""
        return tuple(self._live)

    @property
    def rest_s(self) -> float | None:
        """After a fruitless `step`: seconds until the next is worth calling, when the policy waits on purpose."""
        wake_s = self.scheduler.wake_s
        return None if wake_s is None else max(0.0, wake_s - self.clock.now())

    def submit(self, spec: RequestSpec) -> Accepted | Rejected:
        """Admission is the scheduler's decision; exactly one Finish follows an Accepted.

        Raises EngineDead after a step that broke the loop.
        """
        self._require_whole()
        now = self.clock.now()
        answer = self.scheduler.submit(spec, now)
        if isinstance(answer, Accepted):
            self._live[spec.request_id] = (spec, now)
        return answer

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> Finish | None:
        """End a request now; its blocks are free for the next plan. None: unknown, or ended already."""
        finish = self.scheduler.cancel(request_id, self.clock.now(), reason)
        if finish is None:
            return None
        if message:
            finish = replace(finish, message=message)
        self._note_finish(finish)
        return finish

    def step(self) -> StepEvents | None:
        """One iteration; None when there is nothing to run now.

        Raises StepFailed when the backend failed for good, EngineStalled when the scheduler stopped planning, and
        EngineDead when an earlier step was left half done: by either of these, by a bug, by Ctrl-C in the middle of it.
        """
        self._require_whole()
        try:
            return None if self._begin() is None else self._complete()
        except BaseException as error:
            self._broken = one_line(error)
            raise

    def begin(self) -> StepPlan | None:
        """The first half of `step`: plan, and have the backend compute it. `complete` must be the next call.

        Between the two, the clock may move and nothing may be submitted or cancelled.
        """
        self._require_whole()
        assert self._begun is None, "the step before has not been completed"
        try:
            return self._begin()
        except BaseException as error:
            self._broken = one_line(error)
            raise

    def complete(self) -> StepEvents:
        """The second half of `step`: commit what `begin` computed, at the clock's time now. Raises as `step` does."""
        self._require_whole()
        try:
            return self._complete()
        except BaseException as error:
            self._broken = one_line(error)
            raise

    def _begin(self) -> StepPlan | None:
        if not self.scheduler.has_work:
            self.stalled_polls = 0
            return None
        asked = time.perf_counter()
        plan = self.scheduler.plan(self.clock.now())
        self._scheduler_s = time.perf_counter() - asked
        if plan is None:
            if self.scheduler.wake_s is None:
                self._note_stall()
            return None
        self.stalled_polls = 0
        if plan.released and log.isEnabledFor(logging.INFO):
            self._tell_preemptions(plan)
        began = self.clock.now()
        try:
            outcome: StepResult | Exception = self.backend.execute(plan)
        except Exception as error:
            outcome = error
        self._begun = (plan, began, outcome)
        return plan

    def _complete(self) -> StepEvents:
        assert self._begun is not None, "no step was begun"
        plan, began, outcome = self._begun
        self._begun = None
        if isinstance(outcome, Exception):
            return self._fail(plan, outcome)
        now = self.clock.now()
        asked = time.perf_counter()
        events = self.scheduler.commit(plan, outcome, now)
        self._scheduler_s += time.perf_counter() - asked
        self._note_step(plan, outcome, events, outcome.seconds or now - began, now)
        return events

    def run(self) -> Iterator[StepEvents]:
        """Steps until no work is left; for batch jobs in process. Raises what `step` raises."""
        while self.has_work:
            events = self.step()
            if events is not None:
                yield events
            elif (rest_s := self.rest_s) is not None:
                time.sleep(rest_s)

    def stats(self, *, of_step: bool = False) -> EngineStats:
        """Counters now; with `of_step`, also the measures of the last step."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            steps=self._steps,
            step_seconds=self._step_seconds,
            step_tokens=self._step_tokens,
            errors=self._errors,
            near_boundary=self._near_boundary,
            cost_error=self._cost_error,
            last_step=self._last_step if of_step else None,
        )

    def dump(self) -> str:
        """The state for a log: counters and the oldest live requests; never prompts or outputs."""
        now = self.clock.now()
        lines = [f"{self.scheduler.stats()}", f"{len(self._live)} live requests"]
        lines += [
            f"  {request_id}: {len(spec.prompt)} prompt tokens, max_tokens {spec.sampling.max_tokens}, "
            f"submitted {now - submitted:.3f} s ago"
            for request_id, (spec, submitted) in list(self._live.items())[:_DUMP_LIMIT]
        ]
        if len(self._live) > _DUMP_LIMIT:
            lines.append(f"  and {len(self._live) - _DUMP_LIMIT} more")
        return "\n".join(lines)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise EngineDead(f"the engine stopped in the middle of a step ({self._broken}); make a new one")

    def _fail(self, plan: StepPlan, error: Exception) -> StepEvents:
        """The backend raised: its rows end with ERROR, and unless it can go on, so does everything else."""
        message = one_line(error)
        recoverable = bool(getattr(error, "recoverable", False))
        log.error("step %d failed (%d requests): %s", plan.step, len(plan.ids), message, exc_info=error)
        rows = len(plan.ids)
        # Committing a result of failures, rather than dropping the plan, keeps every plan paired with a commit:
        # counters, call log and replay stay whole.
        result = StepResult(plan.step, ((),) * rows, failures=tuple((row, message) for row in range(rows)))
        now = self.clock.now()
        events = self.scheduler.commit(plan, result, now)
        self._note_step(plan, result, events, 0.0, now)
        if recoverable:
            return events
        finished = events.finished + self._end_all(message)
        raise StepFailed(message, replace(events, finished=finished)) from error

    def _end_all(self, message: str) -> tuple[Finish, ...]:
        """End every live request with ERROR."""
        ended = [self.cancel(request_id, FinishReason.ERROR, message) for request_id in self.live]
        return tuple(finish for finish in ended if finish is not None)

    def _note_step(
        self, plan: StepPlan, result: StepResult, events: StepEvents, seconds: float, ended_s: float
    ) -> None:
        shape = shape_of(plan)
        tokens = shape.tokens
        self._steps += 1
        self._step_seconds += seconds
        self._step_tokens += tokens
        self._near_boundary += result.near_boundary
        self._last_step = StepSample(
            plan.step,
            seconds,
            tokens,
            shape.rows,
            ended_s,
            tokens - plan.counts.count(1),
            plan.predicted_s,
            plan.bound_by,
            shape.context,
            shape.pairs,
            self._scheduler_s,
        )
        cost = self.scheduler.cost
        if cost is not None and self._steps % _COST_ERROR_EVERY == 0:
            self._cost_error = cost.errors()
        for finish in events.finished:
            self._note_finish(finish)
        if self._debug:
            self.scheduler.check_integrity()

    def _note_finish(self, finish: Finish) -> None:
        self._live.pop(finish.request_id, None)
        if finish.reason is FinishReason.ERROR:
            self._errors += 1

    def _tell_preemptions(self, plan: StepPlan) -> None:
        """Whoever sees generation slow down finds here why: memory ran out, or a class of higher priority came."""
        for request_id in plan.released:
            if request_id not in self._live:  # it has ended
                continue
            stats = self.scheduler.stats()
            log.info(
                "step %d: request %s of class %s is preempted and has %d tokens to compute again; "
                "%d of %d KV blocks in use, %d running, %d waiting",
                plan.step,
                request_id,
                self._live[request_id][0].traffic_class,
                self.scheduler.lost_tokens(request_id),
                stats.kv_blocks_used,
                stats.kv_blocks_total,
                stats.num_running,
                stats.num_waiting,
            )

    def _note_stall(self) -> None:
        self.stalled_polls += 1
        if self.stalled_polls < self.stall_limit:
            return
        message = f"the scheduler has work but planned nothing {self.stalled_polls} times in a row"
        log.error("%s\n%s", message, self.dump())
        raise EngineStalled(message, StepEvents(step=-1, finished=self._end_all(message)))


def one_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
