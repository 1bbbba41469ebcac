"""One scheduler under both: what a real engine did comes out of the simulated one, plan by plan."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from paceline.core.calllog import RecordedScheduler, ReplayMismatch, read_calls
from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import POLICIES
from paceline.core.protocols import Backend
from paceline.core.sampling import SamplingParams
from paceline.core.step import FinishReason, RequestSpec, SchedulerStats, StepPlan, StepResult
from paceline.cost.online import OnlineCost
from paceline.engine.loop import EngineLoop
from paceline.simulate.clock import VirtualClock
from paceline.simulate.drive import drive
from paceline.simulate.recorded import recorded
from paceline.simulate.replay import replay
from paceline.simulate.replica import Replica
from tests.core.memory_backend import MemoryBackend
from tests.simulate.laws import Linear

CLASSES = ("interactive", "standard", "batch")


class Ticking(VirtualClock):
    """A machine without a machine: every look at the clock takes a moment, as if work were done in between."""

    __slots__ = ()

    def now(self) -> float:
        self.advance(0.003)
        return super().now()


def record(
    path: Path,
    backend: Backend,
    *,
    policy: str,
    num_blocks: int,
    requests: int,
    vocab: int,
    block_size: int = 16,
    clock: VirtualClock | None = None,
) -> SchedulerStats:
    """A real engine loop under mixed traffic: shared prefixes, several classes, cancels. By default in real time."""
    rng = Random(5)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=block_size * num_blocks,
        block_size=block_size,
        max_num_batched_tokens=96,
        max_num_seqs=8,
        policy=policy,
    )
    shared = tuple(rng.randrange(vocab) for _ in range(3 * block_size))
    with path.open("w", encoding="utf-8") as file:
        scheduler = RecordedScheduler(config, file, OnlineCost())
        loop = EngineLoop(scheduler, backend, clock, debug=True)
        sent = 0
        while sent < requests or loop.has_work:
            while sent < requests and rng.random() < 0.4:
                common = shared[: rng.choice((0, block_size, 2 * block_size, 3 * block_size))]
                own = tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, 4 * block_size)))
                sampling = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 3 * block_size))
                spec = RequestSpec(f"r{sent}", (*common, *own), sampling, traffic_class=rng.choice(CLASSES))
                loop.submit(spec)
                sent += 1
            if loop.live and rng.random() < 0.03:
                loop.cancel(rng.choice(loop.live), rng.choice((FinishReason.ABORT, FinishReason.STOP)))
            if loop.step() is None and loop.rest_s:
                clock.advance(loop.rest_s) if clock is not None else time.sleep(loop.rest_s)
        return scheduler.stats()


def pretend(log: Path, backend: Backend, *, policy: str, num_blocks: int, requests: int) -> None:
    """The same without a model and in no time."""
    record(
        log,
        backend,
        policy=policy,
        num_blocks=num_blocks,
        requests=requests,
        vocab=50,
        block_size=4,
        clock=Ticking(),
    )


@pytest.mark.parametrize("policy", ["slo", pytest.param("decode_first", marks=pytest.mark.slow)])
def test_a_real_run_of_the_default_model(default_path: Path, tmp_path: Path, policy: str) -> None:
    import torch

    from paceline.runtime.backend import ModelBackend
    from paceline.runtime.load import load_model

    torch.set_num_threads(1)
    loaded = load_model(default_path, device="cpu", dtype="float32")
    num_blocks = 24
    log = tmp_path / "calls.jsonl"
    backend = ModelBackend(loaded, num_blocks, 16)
    stats = record(log, backend, policy=policy, num_blocks=num_blocks, requests=10, vocab=loaded.info.vocab_size)
    assert stats.preemptions > 0
    assert stats.prefix_hits_tokens > 0
    _, calls = read_calls(log)
    plans = sum(call["call"] == "plan" for call in calls)
    assert replay(log, OnlineCost()) == plans > 30


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy(tmp_path: Path, policy: str) -> None:
    log = tmp_path / "calls.jsonl"
    record(
        log, MemoryBackend(20, 4), policy=policy, num_blocks=20, requests=40, vocab=50, block_size=4, clock=Ticking()
    )
    assert replay(log, OnlineCost()) > 50


class Failing(MemoryBackend):
    """Fails one request of a step, and a whole step later on."""

    class Recoverable(RuntimeError):
        recoverable = True

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.step == 40:
            raise Failing.Recoverable("out of memory")
        return result


def test_failures_are_part_of_it(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    backend = Failing(20, 4, fail=frozenset({"r3", "r17"}))
    pretend(log, backend, policy="decode_first", num_blocks=20, requests=40)
    assert replay(log, OnlineCost()) > 50


def _change(log: Path, change: Callable[[dict[str, object]], bool]) -> None:
    """Change the first line that can be."""
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines):
        row = json.loads(line)
        if change(row):
            lines[number] = json.dumps(row)
            break
    log.write_text("\n".join(lines) + "\n")


def test_a_difference_is_found(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    record(
        log,
        MemoryBackend(20, 4),
        policy="decode_first",
        num_blocks=20,
        requests=20,
        vocab=50,
        block_size=4,
        clock=Ticking(),
    )

    def one_token_more(row: dict[str, object]) -> bool:
        plan = row.get("plan")
        if isinstance(plan, dict) and plan["step"] == 9:
            plan["counts"][0] += 1
            return True
        return False

    _change(log, one_token_more)
    with pytest.raises(ReplayMismatch, match=r"plan \d+ differs"):
        replay(log, OnlineCost())


def test_a_log_is_traffic_for_another_engine(tmp_path: Path) -> None:
    """Same requests, same answers, same prefix hits where memory is plenty; another policy, another machine."""
    log = tmp_path / "calls.jsonl"
    record(
        log,
        MemoryBackend(40, 4),
        policy="decode_first",
        num_blocks=40,
        requests=30,
        vocab=50,
        block_size=4,
        clock=Ticking(),
    )
    _, calls = read_calls(log)
    said: dict[str, list[int]] = {}
    rows: dict[int, list[str]] = {}
    for call in calls:
        if call["call"] == "plan" and call["plan"]:
            rows[call["plan"]["step"]] = call["plan"]["ids"]
        elif call["call"] == "commit":
            for name, tokens in zip(rows[call["step"]], call["tokens"], strict=True):
                said.setdefault(name, []).extend(tokens)
    answered = [tokens for tokens in said.values() if tokens]
    config = SchedulerConfig(num_blocks=400, max_model_len=160, block_size=4, policy="slo")
    result = drive(recorded(log), Replica("engine", config, Linear(), learns=OnlineCost(), debug=True))
    assert result.ended == "complete"
    assert len(result.records) == len(answered)
    assert sorted(len(record.read_s) for record in result.records) == sorted(map(len, answered))
    assert min(record.scheduled_s for record in result.records) == 0.0
    assert math.isfinite(result.ended_s)
    faster, slower = recorded(log, speed=2.0, skip=3, limit=5), recorded(log, skip=3, limit=5)
    times = [(faster.pop().at_s, slower.pop().at_s) for _ in range(5)]
    assert [fast for fast, _ in times] == pytest.approx([slow / 2 for _, slow in times])
    assert times[0] == (0.0, 0.0)
    assert faster.next_s == math.inf
    assert sum(record.usage.cached_tokens or 0 for record in result.records if record.usage) > 0
