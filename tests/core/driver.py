"""Drives a scheduler the way an engine does, and keeps what clients would have seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.core.config import SchedulerConfig
from paceline.core.pace import Pacer
from paceline.core.protocols import CostModel
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape, shape_of
from paceline.core.step import Accepted, Finish, RequestSpec, StepEvents, StepPlan
from tests.core.memory_backend import EOS, MemoryBackend

VOCAB = 50


def spec(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 8,
    *,
    salt: str = "",
    stop: tuple[int, ...] = (EOS,),
    prompt_logprobs: int | None = None,
    traffic_class: str = "standard",
    tenant: str = "",
    priority: int = 0,
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, prompt_logprobs=prompt_logprobs)
    return RequestSpec(
        name, prompt, sampling, cache_salt=salt, traffic_class=traffic_class, tenant=tenant, priority=priority
    )


def make(num_blocks: int = 64, cost: CostModel | None = None, **settings: object) -> Scheduler:
    values: dict[str, object] = {"max_model_len": 256, "block_size": 4, **settings}
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **values), cost)  # type: ignore[arg-type]


class Run:
    """Drives a scheduler and keeps what clients would have seen. `depth` plans may be in flight at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        depth: int = 1,
        fail: frozenset[str] = frozenset(),
        takes_s: Callable[[StepShape], float] = lambda shape: 1.0,
    ) -> None:
        self.scheduler = scheduler
        config = scheduler.config
        self.backend = MemoryBackend(config.num_blocks, config.block_size, VOCAB, fail)
        self.depth = depth
        self.takes_s = takes_s  # the law of the machine: how long a step takes
        self.now = 0.0
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}  # when each token was shown to its reader
        self.pacers: dict[str, Pacer] = {}  # the readers' side of those who have one
        self.scores: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}

    def submit(self, request: RequestSpec) -> bool:
        answer = self.scheduler.submit(request, self.now)
        if isinstance(answer, Accepted) and answer.pace is not None:
            self.pacers[request.request_id] = Pacer(answer.pace)
        return isinstance(answer, Accepted)

    def cancel(self, name: str) -> None:
        finish = self.scheduler.cancel(name, self.now)
        if finish is not None:
            self._take(StepEvents(-1, finished=(finish,)))

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now) if len(self.in_flight) < self.depth else None
        self.scheduler.check_integrity()
        if plan is not None:
            assert plan.num_tokens > 0
            self.plans.append(plan)
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            oldest = self.in_flight.popleft()
            self.now += self.takes_s(shape_of(oldest))
            self._take(self.scheduler.commit(oldest, self.backend.execute(oldest), self.now))
            self.scheduler.check_integrity()
            return True
        if plan is None and self.scheduler.wake_s is not None:
            self.now = max(self.now, self.scheduler.wake_s)
            return True
        return plan is not None

    def finish(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            assert self.step(), "live requests, and nothing to do"

    def _take(self, events: StepEvents) -> None:
        for name, tokens in zip(events.ids, events.tokens, strict=True):
            pacer = self.pacers.get(name)
            shown = [self.now] * len(tokens) if pacer is None else pacer.show(self.now, len(tokens))
            self.times.setdefault(name, []).extend(shown)
            assert name not in self.finishes, "a token after the terminal event"
            self.tokens.setdefault(name, []).extend(tokens)
        for name, scores in events.prompt_logprobs:
            self.scores.setdefault(name, []).extend(score.token for score in scores)
        for finish in events.finished:
            assert finish.request_id not in self.finishes, "two terminal events"
            self.finishes[finish.request_id] = finish
            if (pacer := self.pacers.get(finish.request_id)) is not None:
                self.times.setdefault(finish.request_id, []).extend(pacer.show(self.now, 0, end=True))


def rows(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.ids, plan.counts, strict=True))
