"""A cost model whose steps all take some factor of another's: what one measured run can say about a chip.

    ScaledCost(AnalyticCost(deployment), 0.93)

Curves carry their shape from chip to chip better than their level: clocks, cooling, drivers and libraries move all
kernels together. One mean from a real run therefore fixes most of what a datasheet leaves open. Where a server can be
asked step by step, `fit.py` learns more.
"""

from __future__ import annotations

from paceline.core.protocols import CostModel, Estimate
from paceline.core.shape import StepShape


class ScaledCost:
    """Implements `CostModel`."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self.cost = cost
        self.factor = factor

    @property
    def ready(self) -> bool:
        """As the other."""
        return self.cost.ready

    def predict(self, shape: StepShape) -> Estimate:
        """The other's estimate and range, by the factor."""
        found, factor = self.cost.predict(shape), self.factor
        return Estimate(found.seconds * factor, found.low * factor, found.high * factor, found.known)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Passed on, as the other would have seen it."""
        self.cost.observe(shape, seconds / self.factor)

    def errors(self) -> tuple[float, float]:
        """Of the other, on what was passed on."""
        return self.cost.errors()
