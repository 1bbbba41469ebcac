"""Values at the points of a grid with holes, read between the points on logarithmic axes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Reading(NamedTuple):
    """A value, and whether points lie on both sides of it along every axis."""

    value: float
    inside: bool


class Grid:
    """A tree with an axis at each level; leaves hold the mean of what was measured at their point.

    Between two keys of a level a value is weighed by the logarithms of the keys; beyond the last key it stays what it
    is there. Subtrees may have different keys, as measured tables do: the largest sizes are often left out.
    """

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        """Rows of (point, value); coordinates are above 0 and all points have as many."""
        gathered: dict[tuple[float, ...], list[float]] = {}
        for point, value in rows:
            gathered.setdefault(tuple(point), []).append(value)
        means = {point: sum(values) / len(values) for point, values in gathered.items()}
        self._root = _Level(sorted(means.items())) if means else None

    def __bool__(self) -> bool:
        return self._root is not None

    def at(self, point: Sequence[float]) -> Reading:
        """The value there; an empty grid has 0 everywhere, and nothing inside."""
        return self._root.at(point, 0) if self._root is not None else Reading(0.0, False)


class _Level:
    """Keys of one axis in ascending order and, for each, its logarithm and its subtree or value."""

    __slots__ = ("below", "keys", "logs")

    def __init__(self, rows: Sequence[tuple[tuple[float, ...], float]]) -> None:
        """Rows sorted by point."""
        grouped: dict[float, list[tuple[tuple[float, ...], float]]] = {}
        for point, value in rows:
            grouped.setdefault(point[0], []).append((point[1:], value))
        self.keys = list(grouped)
        self.logs = [math.log(key) for key in self.keys]
        self.below: list[_Level | float] = [_Level(group) if group[0][0] else group[0][1] for group in grouped.values()]

    def at(self, point: Sequence[float], axis: int) -> Reading:
        where = point[axis]
        high = bisect_left(self.keys, where)
        if high == len(self.keys):
            return Reading(self._below(high - 1, point, axis).value, False)
        if self.keys[high] == where:
            return self._below(high, point, axis)
        if high == 0:
            return Reading(self._below(0, point, axis).value, False)
        left, right = self._below(high - 1, point, axis), self._below(high, point, axis)
        share = (math.log(where) - self.logs[high - 1]) / (self.logs[high] - self.logs[high - 1])
        return Reading(left.value + share * (right.value - left.value), left.inside and right.inside)

    def _below(self, index: int, point: Sequence[float], axis: int) -> Reading:
        below = self.below[index]
        return Reading(below, True) if isinstance(below, float) else below.at(point, axis + 1)
