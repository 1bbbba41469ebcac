"""Constants of a curve from measured kernels: a search by coordinates, on a log scale, without derivatives.

    better = fit_curve(curve, ("floor_s", "share"), predict=lambda c: [...], measured=[...])

Curves take minima over tiles and pieces, so they have kinks and flats that gradients stumble over; a handful of
constants and some hundred rows make a plain search quick enough. What is called a share stays at or below one: a fit
that wants more has found a mechanism that is missing, not a faster chip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

Curve = TypeVar("Curve")
FIRST_STEP, LAST_STEP = 0.4, 0.01  # of the natural logarithm of a constant


def fit_curve(
    curve: Curve,
    names: Sequence[str],
    predict: Callable[[Curve], Sequence[float]],
    measured: Sequence[float],
) -> Curve:
    """The curve with those constants changed that are in `names`. `predict` gives seconds for each measured row."""

    def loss(candidate: Curve) -> float:
        return _loss(predict(candidate), measured)

    best, lowest, step = curve, loss(curve), FIRST_STEP
    while step > LAST_STEP:
        before = lowest
        for name in names:
            value = getattr(best, name)
            for factor in (math.exp(step), math.exp(-step)):
                changed = min(1.0, value * factor) if name.endswith("share") else value * factor
                candidate = replace(best, **{name: changed})  # type: ignore[type-var]
                found = loss(candidate)
                if found < lowest:
                    best, lowest = candidate, found
                    break
        if lowest > before * (1.0 - 1e-3):
            step /= 2.0
    return best


def errors_of(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """(median, 95th percentile) of |predicted - measured| / measured."""
    found = sorted(abs(p / m - 1.0) for p, m in zip(predicted, measured, strict=True))
    return found[len(found) // 2], found[min(len(found) - 1, int(0.95 * len(found)))]


def _loss(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of the absolute log ratio, and of its square: the middle and the tail. Beyond a factor e a row is odd."""
    total = 0.0
    for p, m in zip(predicted, measured, strict=True):
        ratio = abs(math.log(p / m))
        total += ratio + 2.0 * min(ratio * ratio, 1.0)
    return total / len(measured)
