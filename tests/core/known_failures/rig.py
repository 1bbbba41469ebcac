"""A machine with a known law and traffic in virtual time, for scenarios too long for a backend that checks each slot.

    run = Sim(start("slo", cpu), cpu).play(poisson(rng, "r", 2.0, (0.0, 60.0), conversation))
    run.kept("r"), run.ttft_s("r", 0.95), run.worst_gap_s("r")

Times are in seconds of the virtual clock. Every token is real to the scheduler; only its value is always the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil, inf
from typing import Any

from paceline.core.classes import BATCH, TrafficClass
from paceline.core.config import SchedulerConfig
from paceline.core.pace import Pacer
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape, shape_of
from paceline.core.step import Finish, Rejected, RequestSpec, StepPlan, StepResult
from paceline.cost.online import OnlineCost

CHAT = TrafficClass("chat", priority=0, ttft_s=2.0, itl_s=0.1, weight=2.0)
END = 0  # the token that ends a generation
Law = Callable[[StepShape], float]


def cpu(shape: StepShape) -> float:
    """A small machine: 30 ms a step, 2 ms a token, and attention that grows with the prompt."""
    return 0.03 + 0.002 * shape.tokens + 1e-7 * shape.context + 1e-7 * shape.pairs


def gpu(shape: StepShape) -> float:
    """A large one: 12 ms a step, 60 us a token beyond what the weights' read hides."""
    return 0.012 + 6e-5 * max(0, shape.tokens - 128) + 2e-8 * shape.context + 6e-9 * shape.pairs


def taught(law: Law) -> OnlineCost:
    """A cost model that has seen this machine for a while, as after a warm-up."""
    cost = OnlineCost()
    rng = random.Random(0)
    for turn in range(64):
        shape = StepShape()
        for _ in range(rng.randrange(1, 32)):
            shape = shape.plus(rng.randrange(600), 1)
        if turn % 2:
            shape = shape.plus(rng.randrange(1000), rng.randrange(2, 600))
        cost.observe(shape, law(shape))
    return cost


def start(
    policy: str,
    law: Law = cpu,
    *,
    num_blocks: int = 4000,
    classes: tuple[TrafficClass, ...] = (CHAT, BATCH),
    max_num_seqs: int = 256,
    budget: int = 2048,
    caching: bool = True,
    max_waiting: int | None = None,
    cost: OnlineCost | None = None,
    **options: bool | int | float | str,
) -> Scheduler:
    """A scheduler on that machine; `options` are the policy's."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=1_000_000,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        prefix_caching=caching,
        max_waiting=max_waiting,
        policy=policy,
        policy_options=tuple(options.items()),
        classes=classes,
    )
    return Scheduler(config, (cost or taught(law)) if policy == "slo" else None)


@dataclass(frozen=True)
class Ask:
    """One request of a scenario: when it comes, how many tokens it will say, when its client goes away."""

    at_s: float
    spec: RequestSpec
    outputs: int
    leaves_s: float = inf


def ask(
    at_s: float,
    name: str,
    prompt: int | tuple[int, ...],
    outputs: int = 8,
    *,
    kind: str = "chat",
    max_tokens: int | None = None,
    leaves_s: float = inf,
    **fields: Any,
) -> Ask:
    """It says `outputs` tokens; `max_tokens` is what it asked for, the same unless given. A prompt given as a length
    shares no block with another name's."""
    tokens = prompt if isinstance(prompt, tuple) else own_prompt(name, prompt)
    sampling = SamplingParams(max_tokens=max_tokens or outputs, stop_token_ids=(END,))
    return Ask(at_s, RequestSpec(name, tokens, sampling, traffic_class=kind, sent_s=at_s, **fields), outputs, leaves_s)


def own_prompt(name: str, length: int) -> tuple[int, ...]:
    """A prompt whose first token is the name's alone."""
    return (int.from_bytes(name.encode()[-7:]) % 4_000_000_007 % 2**32, *((2,) * (length - 1)))


@dataclass
class Life:
    """What a client saw of its request."""

    ask: Ask
    kind: TrafficClass
    times: list[float] = field(default_factory=list)  # at which its tokens were shown
    finish: Finish | None = None
    pacer: Pacer | None = None  # its reader's
    made: int = 0  # tokens, shown or not

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.ask.at_s if self.times else inf

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]

    @property
    def first_late(self) -> bool:
        """Whether the first token came after it was promised, or not at all."""
        ttft_s = self.ask.spec.ttft_s or self.kind.ttft_s
        return ttft_s is not None and self.ttft_s > ttft_s + 1e-9

    @property
    def late_gaps(self) -> int:
        """Tokens after the first that came later than promised."""
        itl_s = self.ask.spec.itl_s or self.kind.itl_s
        return sum(gap > itl_s + 1e-9 for gap in self.gaps) if itl_s is not None else 0

    @property
    def kept(self) -> bool:
        """Whether its promise was: the first token in time, and all but the class's share of the gaps."""
        allowed = (1.0 - self.kind.percentile) * len(self.gaps)
        return bool(self.times) and not self.first_late and self.late_gaps <= allowed


class Sim:
    """Plays a scenario on a scheduler and keeps every client's view of it."""

    def __init__(self, scheduler: Scheduler, law: Law = cpu, *, check_every: int = 97) -> None:
        self.scheduler = scheduler
        self.law = law
        self.kinds = {kind.name: kind for kind in scheduler.config.classes}
        self.now = 0.0
        self.lives: dict[str, Life] = {}
        self.refused: dict[str, Rejected] = {}
        self.steps = 0
        self.tokens = 0  # computed, recomputed ones included
        self.longest_step_s = 0.0
        self._check_every = check_every
        self._leaving: list[tuple[float, str]] = []
        self.watch: Callable[[StepPlan, float], None] = lambda plan, seconds: None

    def play(self, asks: Iterable[Ask], until_s: float = inf) -> Sim:
        """Let them come in their order; to the end of all, or until a time."""
        coming = deque(sorted(asks, key=lambda one: one.at_s))
        while (coming or self.scheduler.has_work) and self.now < until_s:
            self._meet(coming)
            if not self._step():
                ahead = [coming[0].at_s] if coming else []
                ahead += [self.scheduler.wake_s] if self.scheduler.wake_s is not None else []
                assert ahead or not self.scheduler.has_work, "live requests, and nothing to do"
                self.now = max(self.now, min(ahead, default=self.now))
        self.scheduler.check_integrity()
        return self

    def of(self, prefix: str) -> list[Life]:
        """The lives of all whose name begins so."""
        return [life for name, life in self.lives.items() if name.startswith(prefix)]

    def worst_gap_s(self, prefix: str) -> float:
        return max((gap for life in self.of(prefix) for gap in life.gaps), default=0.0)

    def gap_s(self, prefix: str, quantile: float) -> float:
        return nearest_rank([gap for life in self.of(prefix) for gap in life.gaps], quantile)

    def ttft_s(self, prefix: str, quantile: float = 1.0) -> float:
        return nearest_rank([life.ttft_s for life in self.of(prefix)], quantile)

    def kept(self, prefix: str = "") -> float:
        """Share of those asked for whose promise was kept; who was refused counts as not."""
        asked = self.of(prefix)
        refused = sum(name.startswith(prefix) for name in self.refused)
        return sum(life.kept for life in asked) / max(1, len(asked) + refused)

    def _meet(self, coming: deque[Ask]) -> None:
        while coming and coming[0].at_s <= self.now:
            one = coming.popleft()
            answer = self.scheduler.submit(one.spec, self.now)
            if isinstance(answer, Rejected):
                self.refused[one.spec.request_id] = answer
                continue
            pacer = Pacer(answer.pace) if answer.pace is not None else None
            self.lives[one.spec.request_id] = Life(one, self.kinds[one.spec.traffic_class], pacer=pacer)
            if one.leaves_s < inf:
                heappush(self._leaving, (one.leaves_s, one.spec.request_id))
        while self._leaving and self._leaving[0][0] <= self.now:
            _, name = heappop(self._leaving)
            finish = self.scheduler.cancel(name, self.now)
            if finish is not None:
                self._end(finish)

    def _step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        seconds = self.law(shape_of(plan))
        self.now += seconds
        self.steps += 1
        self.tokens += plan.num_tokens
        self.longest_step_s = max(self.longest_step_s, seconds)
        said = tuple(
            (END if life.made + 1 == life.ask.outputs else 1,) if samples else ()
            for samples, life in zip(plan.samples, map(self.lives.__getitem__, plan.ids), strict=True)
        )
        events = self.scheduler.commit(plan, StepResult(plan.step, said), self.now)
        for name in events.ids:
            life = self.lives[name]
            life.made += 1
            life.times += [self.now] if life.pacer is None else life.pacer.show(self.now, 1)
        for finish in events.finished:
            self._end(finish)
        if self.steps % self._check_every == 0:
            self.scheduler.check_integrity()
        self.watch(plan, seconds)
        return True

    def _end(self, finish: Finish) -> None:
        life = self.lives[finish.request_id]
        assert life.finish is None, "two terminal events"
        life.finish = finish
        if life.pacer is not None:
            life.times += life.pacer.show(self.now, 0, end=True)


def nearest_rank(values: list[float], quantile: float) -> float:
    """The smallest value that this share of all do not exceed."""
    return sorted(values)[max(0, ceil(quantile * len(values)) - 1)] if values else 0.0


def poisson(
    rng: random.Random,
    prefix: str,
    rate_per_s: float,
    span_s: tuple[float, float],
    lengths: Callable[[random.Random], tuple[int, int]],
    **fields: Any,
) -> list[Ask]:
    """Independent arrivals; `lengths` draws (prompt, outputs) of each."""
    found: list[Ask] = []
    at = span_s[0]
    while (at := at + rng.expovariate(rate_per_s)) < span_s[1]:
        prompt, outputs = lengths(rng)
        found.append(ask(at, f"{prefix}{len(found)}", prompt, outputs, **fields))
    return found


def conversation(rng: random.Random) -> tuple[int, int]:
    """Prompt and output of a chat turn: skewed, as real ones are."""
    return min(1500, 8 + int(rng.lognormvariate(4.6, 0.9))), min(300, 2 + int(rng.lognormvariate(3.4, 0.7)))
