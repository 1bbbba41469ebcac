"""The seams: what the scheduler and the engine loop ask of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.core.shape import StepShape
from paceline.core.step import StepPlan, StepResult


class Backend(Protocol):
    """Executes plans in the order given. A model, a simulator, a recorder and a fault injector all are one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan and return its result, rows in the plan's order."""
        ...


class Clock(Protocol):
    """Seconds since an origin that never moves; monotonic."""

    def now(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a step will take, in seconds: expected, and the range that nine in ten steps of its kind fall into.

    Not `known`: the model has seen, or was made for, nothing of this size, and the numbers are an extrapolation.
    """

    seconds: float
    low: float
    high: float
    known: bool = True


class CostModel(Protocol):
    """Predicts how long a step takes, in plain floats so that the answer is reproducible."""

    @property
    def ready(self) -> bool:
        """Whether it has seen enough to be asked."""
        ...

    def predict(self, shape: StepShape) -> Estimate:
        """The time of a step of this shape."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        ...

    def errors(self) -> tuple[float, float]:
        """(median, p95) of |predicted - real| / real over the last steps."""
        ...
