"""Cost models for tests: laws simple enough to check results against by hand."""

from __future__ import annotations

from paceline.core.protocols import Estimate
from paceline.core.shape import StepShape


class Linear:
    """A machine whose steps take a fixed time, and more for each token, KV position and query-key pair."""

    ready = True

    def __init__(
        self,
        step_s: float = 0.010,
        token_s: float = 1e-4,
        context_s: float = 1e-7,
        pair_s: float = 0.0,
        spread: float = 0.0,
    ) -> None:
        self.step_s, self.token_s, self.context_s, self.pair_s = step_s, token_s, context_s, pair_s
        self.spread = spread
        self.asked = 0

    def predict(self, shape: StepShape) -> Estimate:
        self.asked += 1
        seconds = self.step_s + self.token_s * shape.tokens + self.context_s * shape.context + self.pair_s * shape.pairs
        return Estimate(seconds, seconds * (1 - self.spread), seconds * (1 + self.spread))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """It knows."""

    def errors(self) -> tuple[float, float]:
        return 0.0, 0.0
