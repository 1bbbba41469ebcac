"""How well each class's promise is kept: latencies over the last minutes, against what was promised.

Latencies are counted in log-spaced cells, one set per slice of time, so a sample costs one increment, and a report
adds up a few arrays. A cell is 5 % wide: a reported percentile is its upper edge, never better than the truth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.classes import TrafficClass

WINDOW_S = 300.0
SLICE_S = 10.0
_LOWEST_S = 1e-4
_GROWTH = math.log(1.05)
_CELLS = 320  # up to about 600 s; the last one holds everything above
PERCENTILES = (50, 95, 99)
_EXACT = 1e-9  # 0.95 of 20 gaps is 19, which a product of floats may miss by a hair


@dataclass
class _Counts:
    """Samples of one quantity in one slice of time."""

    cells: dict[int, int] = field(default_factory=dict)
    total: int = 0
    kept: int = 0  # within their own target

    def add(self, seconds: float, kept: bool) -> None:
        cell = 0 if seconds <= _LOWEST_S else min(_CELLS, 1 + int(math.log(seconds / _LOWEST_S) / _GROWTH))
        self.cells[cell] = self.cells.get(cell, 0) + 1
        self.total += 1
        self.kept += kept


class _Window:
    """One quantity of one class over the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, _Counts]] = deque()

    def add(self, now: float, seconds: float, target_s: float | None) -> None:
        number = int(now / SLICE_S)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, _Counts()))
            self._drop(number)
        self._slices[-1][1].add(seconds, target_s is None or seconds <= target_s)

    def report(self, now: float, target_s: float | None) -> dict[str, Any]:
        self._drop(int(now / SLICE_S))
        cells: dict[int, int] = {}
        total = kept = 0
        for _, counts in self._slices:
            total += counts.total
            kept += counts.kept
            for cell, count in counts.cells.items():
                cells[cell] = cells.get(cell, 0) + count
        found: dict[str, Any] = {"target_s": target_s, "n": total, "attained": kept / total if total else None}
        for percentile in PERCENTILES:
            found[f"p{percentile}_s"] = _percentile(cells, total, percentile) if total else None
        return found

    def _drop(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number - WINDOW_S / SLICE_S:
            self._slices.popleft()


def _percentile(cells: dict[int, int], total: int, percentile: int) -> float:
    rank = math.ceil(total * percentile / 100)
    seen = 0
    for cell in sorted(cells):
        seen += cells[cell]
        if seen >= rank:
            return _LOWEST_S * math.exp(_GROWTH * cell)
    raise AssertionError("the cells hold fewer samples than their total")


class Outcome:
    """Whether one request stays inside all it was promised: each of its times, and of its gaps the class's share."""

    __slots__ = ("_gaps", "_late_gaps", "_missed", "_percentile", "_windows")

    def __init__(self, percentile: float, windows: dict[str, _Window]) -> None:
        """`windows`: those of its class."""
        self._percentile = percentile
        self._windows = windows
        self._gaps = self._late_gaps = 0
        self._missed = False

    def note(self, quantity: str, now: float, seconds: float, target_s: float | None) -> None:
        """One of its latencies (`quantity`: ttft, itl or e2e), with its target; its class's count it too."""
        self._windows[quantity].add(now, seconds, target_s)
        if target_s is None:
            return
        if quantity == "itl":
            self._gaps += 1
            self._late_gaps += seconds > target_s
        elif seconds > target_s:
            self._missed = True

    @property
    def kept(self) -> bool:
        """So far."""
        return not self._missed and self._gaps - self._late_gaps >= self._percentile * self._gaps - _EXACT


class Attainment:
    """All classes of one server. Times are on one clock that never goes back, in seconds."""

    def __init__(self, classes: Sequence[TrafficClass]) -> None:
        self._classes = {kind.name: kind for kind in classes}
        self._windows = {kind.name: {quantity: _Window() for quantity in ("ttft", "itl", "e2e")} for kind in classes}

    def outcome(self, name: str) -> Outcome:
        """For a new request of class `name`."""
        return Outcome(self._classes[name].percentile, self._windows[name])

    def report(self, now: float) -> dict[str, Any]:
        """By class: what is promised, what the last minutes gave, and whether the promise holds.

        `kept` is None where nothing is promised or nothing happened; else whether each promised quantity attained its
        target in at least the class's share of cases. `margin` is the smallest surplus of attainment over that share.
        """
        found: dict[str, Any] = {}
        for kind in self._classes.values():
            targets = {"ttft": kind.ttft_s, "itl": kind.itl_s, "e2e": kind.e2e_s}
            row: dict[str, Any] = {
                quantity: self._windows[kind.name][quantity].report(now, target) for quantity, target in targets.items()
            }
            surplus = [
                row[quantity]["attained"] - kind.percentile
                for quantity, target in targets.items()
                if target is not None and row[quantity]["attained"] is not None
            ]
            row |= {
                "percentile": kind.percentile,
                "priority": kind.priority,
                "overload": kind.overload.value,
                "kept": min(surplus) >= 0.0 if surplus else None,
                "margin": min(surplus) if surplus else None,
            }
            found[kind.name] = row
        return found
