"""The seams: what the scheduler and the engine loop ask of everything else."""

from __future__ import annotations

from typing import Protocol

from paceline.core.step import StepPlan, StepResult


class Backend(Protocol):
    """Executes plans in the order given. A model, a simulator, a recorder and a fault injector all are one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan and return its result, rows in the plan's order."""
        ...


class Clock(Protocol):
    """Seconds since an origin that never moves; monotonic."""

    def now(self) -> float: ...


class CostModel(Protocol):
    """Predicts how long a plan takes, in plain floats so that the answer is reproducible."""

    def predict(self, plan: StepPlan) -> tuple[float, float, float]:
        """(expected, low, high) seconds."""
        ...

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        ...
