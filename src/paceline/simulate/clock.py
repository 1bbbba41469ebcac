"""Time that moves only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Implements `core.protocols.Clock`. Seconds from the start of the simulation; never goes back."""

    __slots__ = ("_now",)

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0.0, f"time cannot go back by {-seconds} s"
        self._now += seconds

    def move_to(self, time_s: float) -> None:
        """Let time pass until `time_s`; nothing happens if that has been already."""
        if time_s > self._now:
            self._now = time_s
