"""Backends and factories for engine tests: a next token that depends on the history alone, and ways to go wrong.

Factories are named to `EngineClient` as "tests.engine.fakes:...", so everything here runs in engine processes too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import Backend
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step import RequestSpec, StepPlan, StepResult, TokenLogprob
from paceline.engine.loop import RecoverableError
from paceline.engine.messages import EngineInfo
from paceline.engine.process import EngineLaunch
from paceline.engine.server import EngineParts, StageReporter
from paceline.errors import CorruptModel

VOCAB = 97
FACTORY = "tests.engine.fakes:make_engine"


def next_token(history: list[int]) -> int:
    return (len(history) * 31 + sum(history[-3:]) * 7 + history[0]) % VOCAB


def expected_output(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    history = list(prompt)
    for _ in range(max_tokens):
        history.append(next_token(history))
    return tuple(history[len(prompt) :])


class ChainBackend:
    """Keeps tokens by id, as a `Backend` must; `before_step` is where a test makes it slow, fail or die."""

    def __init__(self, before_step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.before_step = before_step

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.tokens[request_id], self.specs[request_id]
        for admission in plan.admitted:
            assert admission.spec.request_id not in self.tokens
            self.tokens[admission.spec.request_id] = [*admission.spec.prompt, *admission.outputs]
            self.specs[admission.spec.request_id] = admission.spec
        self.before_step(plan)
        sampled = [
            self._sample(request_id) if samples else ()
            for request_id, samples in zip(plan.ids, plan.samples, strict=True)
        ]
        asked = [self.specs[request_id].sampling.logprobs is not None for request_id in plan.ids]
        logprobs = tuple(
            tuple(TokenLogprob(token, -0.5, 1) for token in tokens) if wanted else ()
            for wanted, tokens in zip(asked, sampled, strict=True)
        )
        return StepResult(plan.step, tuple(sampled), logprobs=logprobs if any(asked) else (), seconds=0.001)

    def _sample(self, request_id: str) -> tuple[int, ...]:
        tokens = self.tokens[request_id]
        tokens.append(next_token(tokens))
        return (tokens[-1],)


def make_scheduler(**changes: Any) -> Scheduler:
    settings: dict[str, Any] = {"num_blocks": 4096, "max_model_len": 4096, "max_num_batched_tokens": 512, **changes}
    return Scheduler(SchedulerConfig(**settings))


def make_info(scheduler: Scheduler) -> EngineInfo:
    config = scheduler.config
    return EngineInfo(
        model="chain",
        architecture="fake",
        road="native",
        vocab_size=VOCAB,
        max_model_len=config.max_model_len,
        eos_token_ids=(),
        tokenizer_dir="",
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        dtype="none",
        kv_dtype="none",
        device="cpu",
        weights_bytes=0,
        kv_bytes=0,
        namespace="",
    )


def misbehave(config: dict[str, Any]) -> Callable[[StepPlan], None]:
    """`delay_s` slows every step; from step `at_step` on, `what` happens: raise, recoverable, exit, hang."""
    delay_s, at_step, what = config.get("delay_s", 0.0), config.get("at_step", 0), config.get("what")

    def before_step(plan: StepPlan) -> None:
        time.sleep(delay_s)
        if what is None or plan.step < at_step:
            return
        if what == "recoverable" and plan.step == at_step:
            raise RecoverableError("this batch did not fit")
        if what == "raise":
            raise ValueError("the matrix is singular")
        if what == "exit":
            os._exit(3)
        if what == "hang":
            time.sleep(3600)

    return before_step


def make_engine(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    report_stage("read")
    time.sleep(config.get("load_s", 0.0))
    report_stage("warm up")
    report_stage("warm up", 0.5)
    scheduler = make_scheduler(**config.get("scheduler", {}))
    backend: Backend = ChainBackend(misbehave(config))
    return EngineParts(scheduler, backend, make_info(scheduler))


def make_corrupt(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    raise CorruptModel("model.gguf is truncated: 12 of 40 bytes")


def make_bug(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    raise KeyError("hidden_size")


def make_spy(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    parts = make_engine(config, report_stage)
    return parts._replace(info=msgspec.structs.replace(parts.info, model=repr(os.environ.get("PYTHONPATH"))))


def make_suicide(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    report_stage("read")
    os.kill(os.getpid(), config["signal"])
    raise AssertionError("still alive")


def make_once(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    """Starts well as often as the file `config["lives"]` has bytes, and fails after that."""
    with open(config["lives"], "r+b") as file:
        lives = file.read()
        file.seek(0)
        file.truncate()
        file.write(lives[1:])
    if not lives:
        raise CorruptModel("somebody overwrote the model")
    return make_engine(config, report_stage)


class StallingScheduler(Scheduler):
    """Forgets to plan."""

    def plan(self, now: float) -> StepPlan | None:
        return None


def make_stalled(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    scheduler = StallingScheduler(SchedulerConfig(num_blocks=16, max_model_len=64))
    return EngineParts(scheduler, ChainBackend(), make_info(scheduler))


def launch(function: str = "make_engine", **config: Any) -> EngineLaunch:
    return EngineLaunch(f"tests.engine.fakes:{function}", config)


def spec(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **sampling: Any) -> RequestSpec:
    return RequestSpec(request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling))
