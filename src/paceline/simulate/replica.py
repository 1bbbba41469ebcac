"""One simulated engine: the real scheduler, the real engine loop, a simulated backend, and an inbox.

    replica = Replica("a", config, cost)
    replica.deliver(spec, at_s=0.1)                 # reaches the engine at 0.1 s
    while (at_s := replica.next_s) < math.inf:
        turn = replica.turn(at_s)                   # Turn(at_s, events, finished, rejected)

A replica has its own clock, and `next_s` says when it wants to be turned: at the end of the step that it computes, when
somebody came while it was idle, or when its policy wants to look again. Whoever drives many turns the earliest. What
comes during a step waits in the inbox until the step has ended, as in the engine process; so do cancellations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape
from paceline.core.step import Accepted, Finish, FinishReason, Rejected, RequestSpec, StepEvents
from paceline.engine.loop import EngineLoop
from paceline.simulate.backend import SimulatedBackend
from paceline.simulate.clock import VirtualClock
from paceline.simulate.usage import Usage

POLL_S = 0.001  # an engine whose policy plans nothing and does not say when to ask again is asked again after this
# Shapes that an engine's warm-up computes, with how often: a prefill, one stream, a few prompts, a few streams.
_FIRST_STEPS = (
    (StepShape().plus(0, 4), 1),
    (StepShape().plus(4, 1), 2),
    (StepShape().plus(0, 96), 2),
    (StepShape().plus(96, 1), 5),
    (StepShape(192, 8, 192, 8 * 300), 2),
    (StepShape(8, 8, 8 * 25, 0), 5),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one `turn`: tokens and ends of the step that was completed, answers to what lay in the inbox."""

    at_s: float
    events: StepEvents | None = None  # None: no step ended here
    finished: tuple[Finish, ...] = ()  # all that ended: in the step, or cancelled
    rejected: tuple[Rejected, ...] = ()
    accepted: tuple[Accepted, ...] = ()  # those whose tokens are to be shown at a pace


class Replica:
    """An engine that can be turned by whoever owns time. `cost` is the law of its hardware.

    The scheduler's own cost model is `learns` (an `OnlineCost` as in the real engine, say; `warm_up` teaches it before
    the first request). None is for policies that do not ask: it saves a third of the time that a step takes here.
    """

    def __init__(
        self,
        name: str,
        config: SchedulerConfig,
        cost: CostModel,
        *,
        learns: CostModel | None = None,
        start_s: float = 0.0,
        jitter: random.Random | None = None,
        debug: bool = False,
        make_scheduler: Callable[[SchedulerConfig, CostModel | None], Scheduler] = Scheduler,
    ) -> None:
        self.name = name
        self.clock = VirtualClock(start_s)
        self.backend = SimulatedBackend(cost, self.clock, jitter=jitter)
        self.scheduler = make_scheduler(config, learns)
        self.loop = EngineLoop(self.scheduler, self.backend, self.clock, debug=debug)
        self.usage = Usage(cost, self.scheduler)
        self._inbox: list[tuple[RequestSpec, tuple[int, ...] | None] | tuple[str, FinishReason]] = []
        self._stepping = False
        self._due_s = inf  # while no step is computed: when to look again

    @property
    def next_s(self) -> float:
        """When to call `turn` next; inf when there is nothing to do."""
        return self.clock.now() if self._stepping else self._due_s

    @property
    def stepping(self) -> bool:
        """Whether a step is being computed (until `next_s`)."""
        return self._stepping

    @property
    def inbox(self) -> Sequence[object]:
        """What has come and has not been looked at."""
        return self._inbox

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or has come."""
        return not self._inbox and not self.loop.has_work

    def deliver(self, spec: RequestSpec, at_s: float, answer: tuple[int, ...] | None = None) -> None:
        """A request reaches the engine at `at_s`; whether it is taken, the next turn tells.

        `answer` is what it generates (see `SimulatedBackend.will_say`); None: dummies up to its `max_tokens`.
        """
        self._inbox.append((spec, answer))
        if self._stepping:
            self.usage.lengthen(self.backend.meets(len(spec.prompt)))
        self._wake(at_s)

    def cancel(self, request_id: str, at_s: float, reason: FinishReason = FinishReason.ABORT) -> None:
        """A request is to be ended; its `Finish`, if it is live then, comes with the next turn."""
        self._inbox.append((request_id, reason))
        self._wake(at_s)

    def turn(self, now_s: float) -> Turn:
        """Complete the step that ends now, take in what has come, begin the next step."""
        clock = self.clock
        assert not self._stepping or now_s == clock.now(), "a step ends when it ends"
        clock.move_to(now_s)
        events: StepEvents | None = None
        finished: tuple[Finish, ...] = ()
        if self._stepping:
            self._stepping = False
            events = self.loop.complete()
            finished = events.finished
        rejected: tuple[Rejected, ...] = ()
        accepted: tuple[Accepted, ...] = ()
        if self._inbox:
            accepted, rejected, cancelled = self._take_in()
            finished += cancelled
        self._begin(now_s)
        return Turn(now_s, events, finished, rejected, accepted)

    def warm_up(self) -> None:
        """Teach the scheduler's cost model what an engine's warm-up would have: the first steps, before any request."""
        learns = self.scheduler.cost
        if learns is None:
            return
        for shape, times in _FIRST_STEPS:
            for _ in range(times):
                learns.observe(shape, self.backend.cost.predict(shape).seconds * self.backend.slowdown)

    def abandon(self, reason: FinishReason = FinishReason.ERROR) -> tuple[Finish, ...]:
        """The engine dies now: every live request ends, a step under way is lost, the inbox is dropped.

        Requests in the inbox were never accepted: whoever delivered them knows them by their missing answer.
        """
        ended: list[Finish] = []
        if self._stepping:
            self._stepping = False
            # Its tokens reach nobody: who would have ended with them ends like all others.
            ended += (replace(finish, reason=reason, stop_token=None) for finish in self.loop.complete().finished)
        cancelled = [self.loop.cancel(request_id, reason) for request_id in self.loop.live]
        self._inbox.clear()
        self._due_s = inf
        return (*ended, *(finish for finish in cancelled if finish is not None))

    def _wake(self, at_s: float) -> None:
        if not self._stepping:
            self._due_s = min(self._due_s, max(at_s, self.clock.now()))

    def _take_in(self) -> tuple[tuple[Accepted, ...], tuple[Rejected, ...], tuple[Finish, ...]]:
        accepted: list[Accepted] = []
        rejected: list[Rejected] = []
        finished: list[Finish] = []
        for entry in self._inbox:
            head, what = entry
            if isinstance(head, RequestSpec):
                answer = self.loop.submit(head)
                if isinstance(answer, Rejected):
                    rejected.append(answer)
                    continue
                if answer.pace is not None:
                    accepted.append(answer)
                if isinstance(what, tuple):
                    self.backend.will_say(head.request_id, len(head.prompt), what)
            elif isinstance(what, FinishReason):
                finish = self.loop.cancel(head, what)
                self.backend.forget(head)
                if finish is not None:
                    finished.append(finish)
        self._inbox.clear()
        return tuple(accepted), tuple(rejected), tuple(finished)

    def _begin(self, now_s: float) -> None:
        plan = self.loop.begin()
        if plan is not None:
            self._stepping, self._due_s = True, inf
            self.usage.note(plan, now_s, self.clock.now())
        elif not self.loop.has_work:
            self._due_s = inf
        else:
            wake_s = self.scheduler.wake_s
            self._due_s = now_s + POLL_S if wake_s is None else max(now_s, wake_s)
