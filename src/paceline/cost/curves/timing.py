"""What a curve answers: the seconds of one kernel and what binds it."""

from __future__ import annotations

from typing import NamedTuple


class KernelTime(NamedTuple):
    """Seconds of one kernel, what binds it (`compute`, `memory`, `latency`, `link`), and whether the source knows."""

    seconds: float
    bound: str
    known: bool = True


NOTHING = KernelTime(0.0, "latency")


def slower(floor_s: float, compute_s: float, memory_s: float) -> KernelTime:
    """A fixed part, then arithmetic and memory traffic beside each other; named after the largest of the three."""
    longest = max(compute_s, memory_s)
    bound = "latency" if floor_s > longest else "compute" if compute_s > memory_s else "memory"
    return KernelTime(floor_s + longest, bound)
