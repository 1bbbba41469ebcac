"""One kernel of a step and its work, for people, planners and the sum."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cost.efficiency import KernelTime


class Operation(NamedTuple):
    """One kernel of a step, over all its calls."""

    name: str
    calls: int
    flops: float
    bytes: float  # to and from memory, or over the link
    seconds: float
    bound: str  # compute, memory, latency, link or host
    known: bool = True

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def operation(name: str, calls: int, flops: float, moved: float, time: KernelTime) -> Operation:
    """`calls` of one kernel."""
    return Operation(name, calls, calls * flops, calls * moved, calls * time.seconds, time.bound, time.known)
