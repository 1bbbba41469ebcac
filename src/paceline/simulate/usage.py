"""What an engine's time went into: busy or idle, what bound its steps, how full its KV memory was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from paceline.core.protocols import CostModel
from paceline.core.scheduler import Scheduler
from paceline.core.shape import shape_of
from paceline.core.step import Bound, StepPlan

SAMPLE_EVERY = 16  # steps between two looks at memory
EXPLAIN_EVERY = 64  # steps between two looks at the operations of a step, which cost more
SEATS = "seats"  # as many requests run as may


class Explains(Protocol):
    """A cost model that can say which operations a step's time goes into."""

    def operations(self, shape: Any) -> Iterable[Any]:
        """Rows with `seconds` and `bound` (what limits the operation, as text)."""
        ...


@dataclass(frozen=True, slots=True)
class UsageReport:
    """One engine over a span of the run. Shares are of busy time; None where nothing was sampled."""

    steps: int
    seconds: float  # of the span
    busy_s: float
    tokens: int
    prefill_tokens: int  # of rows with more than one token
    rows: int  # summed over steps
    bound_share: dict[str, float]  # what kept steps from being larger: a `core.step.Bound`, or "seats"
    limit_share: dict[str, float]  # what limits the operations (memory, compute, ...), where the cost model can tell
    kv_used_mean: float | None  # share of all blocks, over busy time
    kv_used_max: float | None
    outside_share: float | None  # of busy time, steps that the cost model was not made for

    @property
    def utilisation(self) -> float:
        """Share of the span in which a step was computed."""
        return self.busy_s / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def rows_per_step(self) -> float:
        return self.rows / self.steps if self.steps else 0.0


@dataclass(slots=True)
class _Sampled:
    """Sums over the sampled steps."""

    seconds: float = 0.0
    kv_used_s: float = 0.0  # share of blocks held, times seconds
    kv_used_max: float = 0.0
    outside_s: float = 0.0
    limits_s: dict[str, float] = field(default_factory=dict)


class Usage:
    """Counts as steps begin. Memory is looked at in one step of `SAMPLE_EVERY`."""

    __slots__ = (
        *("_bound_now", "_bounds_s", "_busy_s", "_cost", "_prefill", "_rows", "_sampled"),
        *("_scheduler", "_steps", "_tokens"),
    )

    def __init__(self, cost: CostModel, scheduler: Scheduler) -> None:
        self._cost = cost
        self._scheduler = scheduler
        self._steps = 0
        self._busy_s = 0.0
        self._tokens = 0
        self._prefill = 0
        self._rows = 0
        self._bounds_s: dict[str, float] = {}
        self._bound_now = ""
        self._sampled = _Sampled()

    @property
    def steps(self) -> int:
        return self._steps

    def note(self, plan: StepPlan, began_s: float, ends_s: float) -> None:
        """A step was begun, and will have ended at `ends_s`."""
        seconds = ends_s - began_s
        rows, tokens = len(plan.counts), sum(plan.counts)
        if self._steps % SAMPLE_EVERY == 0:
            self._sample(plan, seconds)
        self._steps += 1
        self._busy_s += seconds
        self._tokens += tokens
        self._rows += rows
        if tokens > rows:
            self._prefill += tokens - plan.counts.count(1)
        bound = self._bound_now = self._bound(plan, rows, tokens)
        self._bounds_s[bound] = self._bounds_s.get(bound, 0.0) + seconds

    def lengthen(self, seconds: float) -> None:
        """The step under way takes so much longer than was said."""
        if seconds:
            self._busy_s += seconds
            self._bounds_s[self._bound_now] += seconds

    def report(self, seconds: float) -> UsageReport:
        """What was counted, over a span of `seconds`."""
        busy, sampled = self._busy_s or 1.0, self._sampled
        looked_at = sampled.seconds
        limits_s = sum(sampled.limits_s.values())
        return UsageReport(
            steps=self._steps,
            seconds=seconds,
            busy_s=self._busy_s,
            tokens=self._tokens,
            prefill_tokens=self._prefill,
            rows=self._rows,
            bound_share={bound: spent / busy for bound, spent in self._bounds_s.items()},
            limit_share={name: spent / limits_s for name, spent in sampled.limits_s.items()} if limits_s else {},
            kv_used_mean=sampled.kv_used_s / looked_at if looked_at else None,
            kv_used_max=sampled.kv_used_max if looked_at else None,
            outside_share=sampled.outside_s / looked_at if looked_at else None,
        )

    def _bound(self, plan: StepPlan, rows: int, tokens: int) -> str:
        """The policy's own word where it has one; else what can be seen from outside."""
        if plan.bound_by is not Bound.NOTHING:
            return str(plan.bound_by.value)
        config = self._scheduler.config
        if tokens >= config.max_num_batched_tokens:
            return str(Bound.BUDGET.value)
        if not self._scheduler.num_waiting:
            return str(Bound.NOTHING.value)
        return SEATS if rows >= config.max_num_seqs else str(Bound.MEMORY.value)

    def _sample(self, plan: StepPlan, seconds: float) -> None:
        sampled, stats = self._sampled, self._scheduler.stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total
        sampled.seconds += seconds
        sampled.kv_used_s += used * seconds
        sampled.kv_used_max = max(sampled.kv_used_max, used)
        shape = shape_of(plan)
        if not getattr(self._cost.predict(shape), "known", True):
            sampled.outside_s += seconds
        if self._steps % EXPLAIN_EVERY == 0 and hasattr(self._cost, "operations"):
            for operation in cast("Explains", self._cost).operations(shape):
                name = str(getattr(operation.bound, "value", operation.bound))
                sampled.limits_s[name] = sampled.limits_s.get(name, 0.0) + operation.seconds
