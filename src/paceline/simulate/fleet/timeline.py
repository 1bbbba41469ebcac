"""What happens when. Equal times keep the order in which they were entered, so one seed gives one history."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

Action = Callable[..., None]  # called with the time, then the arguments it was entered with


class Timeline:
    """A heap of (time, sequence, action, arguments). Time never goes back."""

    __slots__ = ("_heap", "_sequence", "now_s")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._sequence = 0
        self.now_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next action is due; inf when there is none."""
        return self._heap[0][0] if self._heap else inf

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Have `action(time_s, *arguments)` called at that time, or now if it has passed."""
        heappush(self._heap, (max(time_s, self.now_s), self._sequence, action, arguments))
        self._sequence += 1

    def advance(self) -> None:
        """Do what is next."""
        self.now_s, _, action, arguments = heappop(self._heap)
        action(self.now_s, *arguments)

    def move_to(self, time_s: float) -> None:
        """Let time pass until `time_s`, at which something outside this timeline happens."""
        assert self.now_s <= time_s <= self.next_s, "something was due before"
        self.now_s = time_s
