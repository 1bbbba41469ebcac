"""Thousands of request lives, most of them cut short: in every state a request can be in, and while steps fail.

The engine loop and the scheduler are the real ones. The backend's memory notices any read of a block that holds
something else, so a block freed too early shows as much as one that is never freed.
"""

from __future__ import annotations

import random
from collections import Counter
from enum import Enum

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import POLICIES
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, Finish, FinishReason, RequestSpec, StepEvents, StepPlan, StepResult
from paceline.engine.loop import EngineLoop, RecoverableError
from tests.core.memory_backend import EOS, MemoryBackend, expected_output

VOCAB = 50
MAX_MODEL_LEN = 96


class Fate(Enum):
    """When a client gives up."""

    NEVER = "never"
    WAITING = "waiting"  # before it was ever planned
    PREFILLING = "prefilling"  # its prompt is computed in part
    DECODING = "decoding"
    PREEMPTED = "preempted"  # it lost its blocks and waits to be resumed
    RESUMED = "resumed"  # it is being recomputed
    FINISHED = "finished"  # too late: it has ended
    FAILING = "failing"  # it does not give up; the model fails it


class ManualClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class FaultyBackend(MemoryBackend):
    """A memory backend some of whose steps fail as a whole, after releases and admissions were applied."""

    def __init__(self, num_blocks: int, block_size: int, failing: set[str], every: int) -> None:
        super().__init__(num_blocks, block_size, VOCAB)
        self._failing = failing
        self._every = every
        self.seen: set[str] = set()  # every request that was ever admitted
        self.resumed: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            request_id = admission.spec.request_id
            if request_id in self.seen:
                self.resumed.add(request_id)
            self.seen.add(request_id)
        if plan.step % self._every == self._every - 1:
            for request_id in plan.released:
                del self.rows[request_id]
            for admission in plan.admitted:
                self._admit(admission)
            raise RecoverableError("this step failed on purpose")
        self.fail = frozenset(request_id for request_id in plan.ids if request_id in self._failing)
        return super().execute(plan)

    def state(self, spec: RequestSpec) -> Fate:
        """Where a live request stands, from what this backend was told."""
        if spec.request_id not in self.seen:
            return Fate.WAITING
        row = self.rows.get(spec.request_id)
        if row is None:
            return Fate.PREEMPTED
        if spec.request_id in self.resumed:
            return Fate.RESUMED
        return Fate.PREFILLING if row.computed < len(spec.prompt) else Fate.DECODING


class Crowd:
    """Clients that come, read, and give up as their fates say."""

    def __init__(self, policy: str, lives: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lives = lives
        self.failing: set[str] = set()
        self.clock = ManualClock()
        config = SchedulerConfig(
            num_blocks=56,  # twice the longest request: preemption is common
            max_model_len=MAX_MODEL_LEN,
            block_size=4,
            max_num_batched_tokens=40,
            max_num_seqs=24,
            policy=policy,
        )
        self.backend = FaultyBackend(config.num_blocks, config.block_size, self.failing, every=211)
        self.loop = EngineLoop(Scheduler(config), self.backend, self.clock)
        self.specs: dict[str, RequestSpec] = {}  # of live requests
        self.fates: dict[str, Fate] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.given_up: Counter[Fate] = Counter()
        self.reasons: Counter[FinishReason] = Counter()

    def run(self) -> None:
        """Every life from start to end."""
        born = 0
        while born < self.lives or self.loop.has_work:
            while born < self.lives and len(self.specs) < 40:
                self._arrive(f"life-{born}")
                born += 1
            self.clock.time += 0.01
            self._give_up()
            events = self.loop.step()
            if events is None and self.loop.scheduler.wake_s is not None:
                self.clock.time = max(self.clock.time, self.loop.scheduler.wake_s)
            if events is not None:
                self._read(events)
            self._give_up()
            if born % 500 == 0:
                self.loop.scheduler.check_integrity()

    def _arrive(self, name: str) -> None:
        rng = self.rng
        shared = tuple(range(1, rng.choice((1, 1, 10, 33))))  # a system prompt, for half of them
        prompt = shared + tuple(rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 3, 8, 20, 28))))
        sampling = SamplingParams(max_tokens=rng.randrange(1, 30), stop_token_ids=(EOS,))
        spec = RequestSpec(name, prompt, sampling, cache_salt=rng.choice(("", "", "other tenant")))
        fate = rng.choice(list(Fate))
        self.fates[name] = fate
        if fate is Fate.FAILING:
            self.failing.add(name)
        assert isinstance(self.loop.submit(spec), Accepted)
        self.specs[name] = spec
        self.outputs[name] = []

    def _give_up(self) -> None:
        for name, spec in list(self.specs.items()):
            if self.fates[name] is self.backend.state(spec) and self.rng.random() < 0.7:
                self.given_up[self.fates[name]] += 1
                finish = self.loop.cancel(name)
                assert finish is not None
                assert finish.reason is FinishReason.ABORT
                self._end(finish)
                assert self.loop.cancel(name) is None, "it ended twice"

    def _read(self, events: StepEvents) -> None:
        for name, tokens in zip(events.ids, events.tokens, strict=True):
            assert name in self.specs, "a token for a request that has ended"
            self.outputs[name] += tokens
        for finish in events.finished:
            self._end(finish)

    def _end(self, finish: Finish) -> None:
        name = finish.request_id
        self.ended[name] += 1
        self.reasons[finish.reason] += 1
        spec = self.specs.pop(name)
        limit = min(len(spec.prompt) + spec.sampling.max_tokens, MAX_MODEL_LEN)
        wanted = expected_output(spec.prompt, limit, frozenset({EOS}), VOCAB)
        got = self.outputs.pop(name)
        assert finish.output_tokens == len(got)
        complete = finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert got == wanted if complete else got == wanted[: len(got)]
        if self.fates[name] is Fate.FINISHED:
            self.given_up[Fate.FINISHED] += 1
            assert self.loop.cancel(name) is None


def assert_nothing_is_left(crowd: Crowd) -> None:
    """Every accepted request ended once, and everything it held is free again."""
    assert len(crowd.ended) == crowd.lives
    assert set(crowd.ended.values()) == {1}
    loop = crowd.loop
    assert loop.live == ()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    loop.scheduler.check_integrity()
    # The backend hears of the last releases with the next plan: one more request, and it holds that one alone.
    assert isinstance(loop.submit(RequestSpec("last", (1, 2), SamplingParams(max_tokens=1))), Accepted)
    for _ in range(1000):
        loop.step()
        crowd.clock.time += 1.0
        if not loop.has_work:
            break
    assert set(crowd.backend.rows) <= {"last"}


@pytest.mark.parametrize("lives", [4_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_lives_leak_no_block(lives: int) -> None:
    crowd = Crowd("decode_first", lives, seed=1)
    crowd.run()
    assert_nothing_is_left(crowd)
    states = set(Fate) - {Fate.NEVER, Fate.FAILING}
    assert all(crowd.given_up[state] >= lives / 100 for state in states), crowd.given_up
    assert all(crowd.reasons[reason] >= lives / 20 for reason in FinishReason), crowd.reasons
    assert crowd.loop.scheduler.stats().preemptions > lives / 10


@pytest.mark.parametrize("lives", [500, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"decode_first"}))
def test_hundreds_of_lives_leak_no_block_under_any_policy(policy: str, lives: int) -> None:
    crowd = Crowd(policy, lives, seed=2)
    crowd.run()
    assert_nothing_is_left(crowd)
