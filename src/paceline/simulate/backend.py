"""The backend of a simulated engine: a step takes what the cost model says, and its tokens are dummies.

    backend = SimulatedBackend(cost, clock)
    loop = EngineLoop(Scheduler(config), backend, clock)

A request generates `OUTPUT` until its `max_tokens`, or the answer that `will_say` gives. An answer that ends in `STOP`
(which the request's `stop_token_ids` must hold then) ends the request before its `max_tokens`: so a policy sees what
clients ask for, while requests end where they really did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist
from typing import Protocol, runtime_checkable

from paceline.core.protocols import CostModel, Estimate
from paceline.core.shape import StepShape, shape_of
from paceline.core.step import StepPlan, StepResult
from paceline.simulate.clock import VirtualClock

OUTPUT = 0  # every generated token
STOP = 1  # the token that ends a request before its max_tokens
FIRST_PROMPT = 2  # ids below are never part of a prompt

_TOKEN = (OUTPUT,)
_Z95 = NormalDist().inv_cdf(0.95)


class Draws(Protocol):
    """Draws step times."""

    def draw(self, shape: StepShape) -> float:
        """Seconds of one step of this shape."""
        ...


@runtime_checkable
class Noisy(Protocol):
    """A cost model that knows how its steps scatter, and how long a slow spell lasts."""

    def noise(self, rng: random.Random) -> Draws:
        """A source of step times of its own."""
        ...


class SimulatedBackend:
    """Implements `core.protocols.Backend`: moves its clock by the predicted time of each step.

    With `jitter`, a step's time is drawn with that generator: as the cost model's own `noise` says, if it has one
    (`cost/fit.py`), else from the range of its estimate. Without, every step takes the expected time.
    """

    __slots__ = ("_answers", "_draw", "_jitter", "clock", "cost", "slowdown")

    def __init__(self, cost: CostModel, clock: VirtualClock, *, jitter: random.Random | None = None) -> None:
        self.cost = cost
        self.clock = clock
        self.slowdown = 1.0  # factor on every step, for an engine that is ill
        self._jitter = jitter
        self._draw = None if jitter is None else _draw_of(cost, jitter)
        self._answers: dict[str, tuple[int, tuple[int, ...]]] = {}  # prompt length, tokens

    def will_say(self, request_id: str, prompt_len: int, answer: tuple[int, ...]) -> None:
        """The tokens that a request generates, in order; the last must end it."""
        self._answers[request_id] = (prompt_len, answer)

    def forget(self, request_id: str) -> None:
        """The request has ended in another way."""
        self._answers.pop(request_id, None)

    def takes_s(self, shape: StepShape) -> float:
        """Seconds of one step of this shape, here and now."""
        seconds = self.cost.predict(shape).seconds if self._draw is None else self._draw(shape)
        return seconds * self.slowdown

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass; one dummy token for every row that samples."""
        seconds = self.takes_s(shape_of(plan))
        self.clock.advance(seconds)
        samples = plan.samples
        tokens: tuple[tuple[int, ...], ...] = (_TOKEN,) * len(samples)
        if not all(samples):
            tokens = tuple(_TOKEN if sampled else () for sampled in samples)
        return StepResult(plan.step, self._as_told(plan, tokens) if self._answers else tokens, seconds=seconds)

    def _as_told(self, plan: StepPlan, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The next token of its answer for every row that samples and has one."""
        answers = self._answers
        changed = list(tokens)
        for row, name in enumerate(plan.ids):
            if name in answers and tokens[row]:
                prompt_len, answer = answers[name]
                place = plan.starts[row] + plan.counts[row] - prompt_len
                changed[row] = (answer[place],)
                if place + 1 == len(answer):
                    del answers[name]
        return tuple(changed)


def _draw_of(cost: CostModel, rng: random.Random) -> Callable[[StepShape], float]:
    if isinstance(cost, Noisy):
        return cost.noise(rng).draw
    return lambda shape: drawn(cost.predict(shape), rng)


def drawn(estimate: Estimate, rng: random.Random) -> float:
    """A time from the estimate's range: log-normal, its median the expected time, its 5 % and 95 % points the ends."""
    z = rng.gauss(0.0, 1.0)
    edge = estimate.low if z < 0 else estimate.high
    if edge <= 0.0 or estimate.seconds <= 0.0:
        return estimate.seconds
    return estimate.seconds * math.exp(abs(z) / _Z95 * math.log(edge / estimate.seconds))
