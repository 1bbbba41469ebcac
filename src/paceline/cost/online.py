"""The time of a step, learned from the steps themselves.

    seconds ~ w0 + w1 * rows + w2 * min(tokens, SMALL) + w3 * tokens + w4 * context + w5 * pairs,   all w >= 0

w0 is what every step pays (launches, weights read once), the two token terms are the matrix multiplies (a few rows are
bound by reading the weights, many by arithmetic), `context` is KV read, `pairs` the attention of prefills. The fit is
ridge regression on relative errors, so that a short decode counts as much as a long prefill, over sums that forget:
decode-only steps and steps with a prefill forget apart, each by its own steps, so an hour of decoding does not wipe out
what is known of prefills. A step far off the rest (a page fault, a neighbour on the machine) is counted with less
weight, as Huber's estimator does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from paceline.core.protocols import Estimate
from paceline.core.shape import StepShape

SMALL = 16  # rows up to which a matrix multiply is bound by reading the weights
SCALES = (1.0, 16.0, float(SMALL), 256.0, 4096.0, 65536.0)  # brings every feature near one
FORGET = 0.998  # weight of what was known, per step of the same kind: the last 500 steps count
REFIT_EVERY = 8  # steps
RIDGE = 1e-4  # pull towards the last fit, against directions that recent traffic does not show
HUBER = 3.0  # residuals beyond this many median residuals lose weight
WINDOW = 256  # residuals kept per kind
MINIMUM = 8  # observations before it can be asked
SIZE = len(SCALES)

Vector = list[float]


class OnlineCost:
    """Implements `CostModel`. About 5 us for an answer, 100 us for every eighth observation."""

    def __init__(self) -> None:
        self._weights: Vector = [0.0] * SIZE
        self._kinds = (_Sums(), _Sums())  # decode only; with a prefill
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether it has seen enough steps to be asked."""
        return self._seen >= MINIMUM

    def predict(self, shape: StepShape) -> Estimate:
        """Expected seconds, and the range of nine in ten steps of this kind."""
        seconds = _dot(self._weights, _features(shape))
        low, high = self._kinds[shape.pairs > 0].ratios.bounds()
        return Estimate(seconds, seconds * low, seconds * high)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one step."""
        if seconds <= 0.0 or shape.rows == 0:
            return
        features = _features(shape)
        kind = self._kinds[shape.pairs > 0]
        weight = 1.0
        if self.ready:
            predicted = _dot(self._weights, features)
            ratio = seconds / predicted if predicted > 0.0 else 1.0
            residual = abs(ratio - 1.0)
            usual = max(kind.ratios.median_error(), 0.02)
            if residual > HUBER * usual:
                weight = HUBER * usual / residual
            kind.ratios.add(ratio)
        kind.add(features, seconds, weight)
        self._seen += 1
        if self._seen < 4 * MINIMUM or self._seen % REFIT_EVERY == 0:
            self._refit()

    def errors(self) -> tuple[float, float]:
        """(median, p95) of |predicted - real| / real over the last steps; (0, 0) before any."""
        found = sorted(abs(1.0 / ratio - 1.0) for kind in self._kinds for ratio in kind.ratios.recent())
        if not found:
            return 0.0, 0.0
        return found[len(found) // 2], found[min(len(found) - 1, int(0.95 * len(found)))]

    def _refit(self) -> None:
        matrix = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(*(k.matrix for k in self._kinds), strict=True)
        ]
        vector = [a + b for a, b in zip(*(k.vector for k in self._kinds), strict=True)]
        pull = RIDGE * max(matrix[i][i] for i in range(SIZE))
        for i in range(SIZE):
            matrix[i][i] += pull
            vector[i] += pull * self._weights[i]
        self._weights = _solve_non_negative(matrix, vector)


class _Sums:
    """What one kind of step has taught: forgetting sums of the normal equations, and how far off predictions were."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * SIZE for _ in range(SIZE)]
        self.vector = [0.0] * SIZE
        self.ratios = _Ratios()

    def add(self, features: Vector, seconds: float, weight: float) -> None:
        relative = [value / seconds for value in features]  # makes the target 1: errors are relative
        for i, value in enumerate(relative):
            row = self.matrix[i]
            scaled = weight * value
            for j in range(SIZE):
                row[j] = FORGET * row[j] + scaled * relative[j]
            self.vector[i] = FORGET * self.vector[i] + scaled


class _Ratios:
    """real / predicted of the last steps, in order of time and of size."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, ratio: float) -> None:
        self._recent.append(ratio)
        insort(self._sorted, ratio)
        if len(self._recent) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def recent(self) -> tuple[float, ...]:
        return tuple(self._recent)

    def bounds(self) -> tuple[float, float]:
        """The 5 % and 95 % quantiles; a wide guess while there are few."""
        count = len(self._sorted)
        if count < 2 * MINIMUM:
            return 0.5, 1.5
        return self._sorted[count // 20], self._sorted[count - 1 - count // 20]

    def median_error(self) -> float:
        """Half of all are within this of one, roughly: from the quartiles, which need no second sort."""
        count = len(self._sorted)
        if count < MINIMUM:
            return 0.5
        return max(self._sorted[3 * count // 4] - 1.0, 1.0 - self._sorted[count // 4], 0.0)


def _features(shape: StepShape) -> Vector:
    raw = (1.0, shape.rows, min(shape.tokens, SMALL), shape.tokens, shape.context, shape.pairs)
    return [value / scale for value, scale in zip(raw, SCALES, strict=True)]


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve_non_negative(matrix: list[Vector], vector: Vector) -> Vector:
    """Solve on the features that stay positive: the most negative weight leaves until none is left."""
    active = list(range(len(vector)))
    while active:
        found = _solve([[matrix[i][j] for j in active] for i in active], [vector[i] for i in active])
        worst = min(range(len(active)), key=found.__getitem__)
        if found[worst] >= 0.0:
            weights = [0.0] * len(vector)
            for i, value in zip(active, found, strict=True):
                weights[i] = value
            return weights
        del active[worst]
    return [0.0] * len(vector)


def _solve(matrix: list[Vector], vector: Vector) -> Vector:
    """Gaussian elimination of a symmetric positive definite system (the ridge makes it so): no pivoting needed."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        pivot = rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot[i]
            if factor:
                row = rows[k]
                for j in range(i, size + 1):
                    row[j] -= factor * pivot[j]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
