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
from paceline.cost.beside import Beside
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


@runtime_checkable
class Shared(Protocol):
    """A cost model of a machine whose cores the server shares with the step (`cost/fitted.py`)."""

    def seconds(self, shape: StepShape) -> float:
        """Of a step beside which nothing goes on."""
        ...

    def beside_s(self, beside: Beside) -> float:
        """How much longer it takes for what does."""
        ...


class SimulatedBackend:
    """Implements `core.protocols.Backend`: moves its clock by the predicted time of each step.

    With `jitter`, a step's time is drawn with that generator: as the cost model's own `noise` says, if it has one
    (`cost/fit.py`), else from the range of its estimate. Without, every step takes the expected time.

    Where the server takes its share of the machine, a step takes longer for each token that the step before brought,
    if it ended just now, and for each request that comes meanwhile (`meets`).
    """

    __slots__ = ("_alone", "_answers", "_beside", "_brought", "_ended_s", "clock", "cost", "slowdown")

    def __init__(self, cost: CostModel, clock: VirtualClock, *, jitter: random.Random | None = None) -> None:
        self.cost = cost
        self.clock = clock
        self.slowdown = 1.0  # factor on every step, for an engine that is ill
        self._alone = _alone_of(cost) if jitter is None else _draw_of(cost, jitter)
        self._beside = cost.beside_s if isinstance(cost, Shared) else None
        self._ended_s, self._brought = -math.inf, 0  # the step before, and the tokens it brought
        self._answers: dict[str, tuple[int, tuple[int, ...]]] = {}  # prompt length, tokens

    def will_say(self, request_id: str, prompt_len: int, answer: tuple[int, ...]) -> None:
        """The tokens that a request generates, in order; the last must end it."""
        self._answers[request_id] = (prompt_len, answer)

    def forget(self, request_id: str) -> None:
        """The request has ended in another way."""
        self._answers.pop(request_id, None)

    def meets(self, prompt_tokens: int) -> float:
        """A request comes while a step is computed; by how much that puts off its end."""
        if self._beside is None:
            return 0.0
        seconds = self._beside(Beside(requests=1, prompt_tokens=prompt_tokens)) * self.slowdown
        self.clock.advance(seconds)
        self._ended_s = self.clock.now()
        return seconds

    def alone_s(self, shape: StepShape) -> float:
        """Seconds of one step of this shape beside which nothing goes on; drawn, with jitter."""
        return self._alone(shape)

    def let_pass(self, seconds: float, tokens: tuple[tuple[int, ...], ...]) -> float:
        """Let a step's time go by, with what the server takes from it; how long it was.

        `seconds` is the step alone, `tokens` what it brings.
        """
        if self._beside is not None:
            sent = self._brought if self.clock.now() == self._ended_s else 0
            seconds += self._beside(Beside(sent))
            self._brought = sum(map(len, tokens))
        seconds *= self.slowdown
        self.clock.advance(seconds)
        self._ended_s = self.clock.now()
        return seconds

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass; one dummy token for every row that samples."""
        samples = plan.samples
        tokens: tuple[tuple[int, ...], ...] = (_TOKEN,) * len(samples)
        if not all(samples):
            tokens = tuple(_TOKEN if sampled else () for sampled in samples)
        seconds = self.let_pass(self.alone_s(shape_of(plan)), tokens)
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


def _alone_of(cost: CostModel) -> Callable[[StepShape], float]:
    return cost.seconds if isinstance(cost, Shared) else lambda shape: cost.predict(shape).seconds


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
