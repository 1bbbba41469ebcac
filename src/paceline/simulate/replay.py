"""A recorded run again, through the engine loop and the simulated backend: every plan must come out as it was.

    compared = replay("calls.jsonl", OnlineCost())

`core.calllog.replay` asks the scheduler alone; here the real engine loop calls it, a simulated backend stands for the
model, and a virtual clock for the machine's. Tokens, failures and times are those of the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.calllog import ReplayMismatch, plan_row, read_calls, result_from_row, spec_from_row
from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel, Estimate
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape
from paceline.core.step import Accepted, FinishReason, StepPlan, StepResult
from paceline.engine.loop import EngineLoop
from paceline.errors import PacelineError
from paceline.simulate.backend import SimulatedBackend
from paceline.simulate.clock import VirtualClock


def replay(path: str | Path, learns: CostModel | None = None) -> int:
    """The number of plans compared. Raises ReplayMismatch at the first that differs.

    `learns` is the scheduler's cost model, in the state in which the recorded one was when the log began.
    """
    config, calls = read_calls(path)
    run = _Replay(config, list(calls), learns)
    for call in run.calls:
        run.make(call)
    return run.compared


class _NoLaw:
    """In place of a cost model: every step's time is in the log."""

    ready = True

    def predict(self, shape: StepShape) -> Estimate:
        raise AssertionError("the log tells how long a step took")

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Nothing to learn."""

    def errors(self) -> tuple[float, float]:
        return 0.0, 0.0


class LoggedBackend(SimulatedBackend):
    """Tokens, failures and end of each step as a log has them."""

    __slots__ = ("_commits",)

    def __init__(self, commits: dict[int, dict[str, Any]], clock: VirtualClock) -> None:
        super().__init__(_NoLaw(), clock)
        self._commits = commits

    def execute(self, plan: StepPlan) -> StepResult:
        """Let time pass until the step's commit, and give what it was given."""
        if plan.step not in self._commits:
            raise ReplayMismatch(f"step {plan.step} is planned, and the log does not say how it ended")
        commit = self._commits[plan.step]
        self.clock.move_to(commit["now"])
        return result_from_row(commit)


class _Replay:
    """One engine, and where in the log it stands."""

    def __init__(self, config: SchedulerConfig, calls: list[dict[str, Any]], learns: CostModel | None) -> None:
        commits = {call["step"]: call for call in calls if call["call"] == "commit"}
        # A plan whose step was under way when the log ended has nothing to be committed with.
        while calls and calls[-1]["call"] == "plan" and calls[-1]["plan"] and calls[-1]["plan"]["step"] not in commits:
            calls.pop()
        self.calls = calls
        self.compared = 0
        self._clock = VirtualClock(calls[0]["now"] if calls and "now" in calls[0] else 0.0)
        self._scheduler = Scheduler(config, learns)
        self._loop = EngineLoop(self._scheduler, LoggedBackend(commits, self._clock), self._clock)
        self._stepping = False

    def make(self, call: dict[str, Any]) -> None:
        """One call of the log, by way of the loop."""
        if self._stepping and call["call"] != "commit":
            raise PacelineError(f"{call['call']} during a step: no engine loop wrote this; core.calllog can replay it")
        if "now" in call:
            self._clock.move_to(call["now"])
        match call["call"]:
            case "submit":
                accepted = isinstance(self._loop.submit(spec_from_row(call["spec"])), Accepted)
                if accepted != call["accepted"]:
                    raise ReplayMismatch(f"submit of {call['spec']['request_id']!r}: accepted is now {accepted}")
            case "plan":
                self._plan(call["plan"])
            case "commit":
                self._loop.complete()
                self._stepping = False
            case "cancel":
                self._loop.cancel(call["request_id"], FinishReason(call["reason"]))
            case "adopt":
                self._scheduler.adopt(call["tokens"], call["salt"])
            case "start_over":
                self._scheduler.start_over()
            case other:
                raise PacelineError(f"unknown call {other!r} in a call log")

    def _plan(self, recorded: dict[str, Any] | None) -> None:
        plan = self._loop.begin()
        self._stepping = plan is not None
        row = None if plan is None else plan_row(plan)
        if row != recorded:
            raise ReplayMismatch(f"plan {self.compared} differs: recorded {recorded}, now {row}")
        self.compared += 1
