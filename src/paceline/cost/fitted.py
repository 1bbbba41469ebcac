"""A fitted step-time model: weights on features of a step's shape, and how far off it was, by kind and size of step.

    seconds = sum of w * feature,   all w >= 0, so that more work never takes less time

`min(tokens, k)` is work that stops growing at k tokens: a matrix multiply of few rows is bound by reading the weights.
`max(tokens - k, 0)` is work that begins there: tiles, caches that no longer hold it. Which knots matter is the fit's
choice; weights of zero are dropped. What a server takes from a step meanwhile is kept apart (`beside.py`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.protocols import Estimate
from paceline.core.shape import StepShape
from paceline.cost.beside import Beside, Toll
from paceline.errors import ConfigError

DECODE, PREFILL = "decode", "prefill"  # kinds of step: without and with a row of more than one token
QUANTILES = (
    *(0.0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 1.0),
)
LOW, HIGH = QUANTILES.index(0.05), QUANTILES.index(0.95)
_PLAIN = ("step", "rows", "chunk", "context", "pairs")  # features without a knot
SLACK = 1.1  # how far beyond the largest step seen the model still counts as asked inside


@dataclass(frozen=True, slots=True)
class Term:
    """One feature and its weight in seconds. `knot` is in tokens, for the two features that have one."""

    feature: str
    knot: float = 0.0
    weight: float = 0.0

    def value(self, shape: StepShape) -> float:
        """The feature of a shape."""
        match self.feature:
            case "step":
                return 1.0
            case "rows":
                return shape.rows
            case "tokens_to":
                return min(shape.tokens, self.knot)
            case "tokens_beyond":
                return max(0.0, shape.tokens - self.knot)
            case "chunk":  # a step with a prefill, whatever its size
                return 1.0 if shape.pairs else 0.0
            case "context":
                return shape.context
            case "pairs":
                return shape.pairs
        raise ConfigError(f"a cost model has no feature {self.feature!r}")


@dataclass(frozen=True, slots=True)
class Band:
    """Steps of one kind with up to so many tokens: quantiles of real / predicted without its toll, out of sample."""

    kind: str
    most_tokens: float
    rows: int
    ratios: tuple[float, ...]  # at QUANTILES


@dataclass(frozen=True, slots=True)
class Range:
    """The largest step of one kind that the model was fitted on."""

    tokens: int = 0
    rows: int = 0
    context: int = 0
    pairs: int = 0

    def holds(self, shape: StepShape) -> bool:
        """Whether a shape is inside, give or take SLACK."""
        return (
            shape.tokens <= SLACK * self.tokens
            and shape.rows <= SLACK * self.rows
            and shape.context <= SLACK * self.context
            and shape.pairs <= SLACK * self.pairs
        )


def kind_of(shape: StepShape) -> str:
    """DECODE or PREFILL."""
    return PREFILL if shape.pairs else DECODE


class FittedCost:
    """Implements `CostModel` from a fit; it does not learn any more. A few microseconds an answer.

    `persistence` is how much of a step's deviation the next one inherits (0: none): machines have slow moments, not
    only slow steps.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        bands: Sequence[Band],
        ranges: Mapping[str, Range],
        *,
        errors: tuple[float, float] = (0.0, 0.0),
        persistence: float = 0.0,
        toll: Toll | None = None,
    ) -> None:
        self.terms = tuple(term for term in terms if term.weight > 0.0)
        self.bands = tuple(sorted(bands, key=lambda band: (band.kind, band.most_tokens)))
        self.ranges = dict(ranges)
        self.persistence = persistence
        self.toll = toll or Toll()
        self._errors = errors
        self._plain = tuple(sum(t.weight for t in self.terms if t.feature == name) for name in _PLAIN)
        self._knots, self._pieces = _pieces(self.terms)
        self._by_kind = {
            kind: tuple(band for band in self.bands if band.kind == kind) or self.bands for kind in (DECODE, PREFILL)
        }
        self._edges = {kind: [band.most_tokens for band in bands] for kind, bands in self._by_kind.items()}

    @property
    def ready(self) -> bool:
        """Always: the fit is done."""
        return True

    def seconds(self, shape: StepShape) -> float:
        """The expected time of a step beside which nothing goes on: what `terms` sum up to."""
        step, rows, chunk, context, pairs = self._plain
        start, slope = self._pieces[bisect_left(self._knots, shape.tokens)]
        seconds = step + rows * shape.rows + context * shape.context + start + slope * shape.tokens
        return seconds + chunk + pairs * shape.pairs if shape.pairs else seconds

    def predict(self, shape: StepShape) -> Estimate:
        """Expected seconds, the range of nine in ten steps of this kind and size, and whether such were seen.

        Beside it, as in a server that goes on like this, a token is sent for each row that decodes.
        """
        seconds = self.seconds(shape)
        sent_s = self.beside_s(Beside(sent=shape.rows - 1 if shape.pairs else shape.rows))
        ratios = self.band(shape).ratios
        seen = self.ranges.get(kind_of(shape))
        known = seen is not None and seen.holds(shape)
        return Estimate(seconds + sent_s, seconds * ratios[LOW] + sent_s, seconds * ratios[HIGH] + sent_s, known)

    def beside_s(self, beside: Beside) -> float:
        """How much longer a step takes for what the server does meanwhile."""
        return self.toll.seconds(beside)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Nothing: refit from a longer recording instead."""

    def errors(self) -> tuple[float, float]:
        """(median, p95) of |predicted - real| / real, each step predicted by a fit that had not seen it."""
        return self._errors

    def band(self, shape: StepShape) -> Band:
        """Whose residuals speak for this shape."""
        kind = kind_of(shape)
        bands = self._by_kind[kind]
        return bands[min(bisect_left(self._edges[kind], shape.tokens), len(bands) - 1)]

    def noise(self, rng: random.Random) -> Noise:
        """Step times with the spread that was measured; the same `rng` state gives the same times."""
        return Noise(self, rng)

    def to_row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "terms": [[term.feature, term.knot, term.weight] for term in self.terms],
            "bands": [[band.kind, band.most_tokens, band.rows, list(band.ratios)] for band in self.bands],
            "quantiles": list(QUANTILES),
            "ranges": {kind: [r.tokens, r.rows, r.context, r.pairs] for kind, r in self.ranges.items()},
            "errors": {"median": self._errors[0], "p95": self._errors[1]},
            "persistence": self.persistence,
            "beside": asdict(self.toll),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> FittedCost:
        """What `to_row` made. Raises ConfigError for anything else."""
        try:
            terms = [Term(str(feature), float(knot), float(weight)) for feature, knot, weight in row["terms"]]
            bands = [
                Band(str(k), float(most), int(n), tuple(map(float, ratios))) for k, most, n, ratios in row["bands"]
            ]
            ranges = {str(kind): Range(*map(int, values)) for kind, values in row["ranges"].items()}
            errors = float(row["errors"]["median"]), float(row["errors"]["p95"])
            persistence = float(row["persistence"])
            quantiles = tuple(row["quantiles"])
            toll = Toll.from_row(row.get("beside") or {})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the cost model cannot be read: {type(error).__name__}: {error}") from None
        numbers = [*errors, persistence, *(x for t in terms for x in (t.knot, t.weight)), *_flat(bands)]
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
            raise ConfigError("the cost model cannot be read: a number in it is negative or not finite")
        if quantiles != QUANTILES or not bands or any(len(band.ratios) != len(QUANTILES) for band in bands):
            raise ConfigError("the cost model cannot be read: its bands do not have the quantiles of this version")
        for term in terms:
            term.value(StepShape())  # an unknown feature is told now, not in the middle of a simulation
        return cls(terms, bands, ranges, errors=errors, persistence=persistence, toll=toll)


def _pieces(terms: Sequence[Term]) -> tuple[list[float], list[tuple[float, float]]]:
    """The terms in tokens as one piecewise linear function: knots; (start, slope) up to each and beyond the last."""
    knots = sorted({term.knot for term in terms if term.feature.startswith("tokens")})
    pieces = []
    for place in range(len(knots) + 1):
        start = slope = 0.0
        for term in terms:
            beyond = place > 0 and term.knot <= knots[place - 1]
            if term.feature == "tokens_to":
                start, slope = (start + term.weight * term.knot, slope) if beyond else (start, slope + term.weight)
            elif term.feature == "tokens_beyond" and beyond:
                start, slope = start - term.weight * term.knot, slope + term.weight
        pieces.append((start, slope))
    return knots, pieces


class Noise:
    """Draws times of steps beside which nothing goes on: expected seconds times a ratio of the shape's band.

    The ratios follow the band's measured distribution, whatever its shape; their order in time follows a first-order
    autoregression on the normal scale (a Gaussian copula), whose lag-1 correlation is the measured persistence.
    """

    def __init__(self, cost: FittedCost, rng: random.Random) -> None:
        self._cost, self._rng = cost, rng
        self._fresh = math.sqrt(1.0 - cost.persistence**2)
        self._z = rng.gauss(0.0, 1.0)

    def draw(self, shape: StepShape) -> float:
        """Seconds of the next step."""
        self._z = self._cost.persistence * self._z + self._fresh * self._rng.gauss(0.0, 1.0)
        share = 0.5 * (1.0 + math.erf(self._z / math.sqrt(2.0)))
        return self._cost.seconds(shape) * at_share(self._cost.band(shape).ratios, share)


def at_share(ratios: Sequence[float], share: float) -> float:
    """The quantile at `share` (0 to 1), linear between those kept."""
    place = min(max(bisect_left(QUANTILES, share), 1), len(QUANTILES) - 1)
    before, after = QUANTILES[place - 1], QUANTILES[place]
    return ratios[place - 1] + (ratios[place] - ratios[place - 1]) * (share - before) / (after - before)


def _flat(bands: Sequence[Band]) -> list[float]:
    return [ratio for band in bands for ratio in band.ratios]
