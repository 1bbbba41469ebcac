"""How much: the sizes of this step's prefill chunks, from what each still has to compute and what the step can take.

Each function takes `remaining` (tokens of each prompt not yet computed, in order of service), the `capacity` in tokens
and the `unit` a cut is rounded down to, and gives one size per prompt; 0 means: not in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Chunking = Callable[[Sequence[int], int, int], list[int]]


def whole(remaining: Sequence[int], capacity: int, unit: int) -> list[int]:
    """No cuts: each prompt fits as a whole or the line stops at it."""
    sizes = [0] * len(remaining)
    for turn, tokens in enumerate(remaining):
        if tokens > capacity:
            break
        sizes[turn] = tokens
        capacity -= tokens
    return sizes


def first_come(remaining: Sequence[int], capacity: int, unit: int) -> list[int]:
    """Each in turn takes all it needs; the one that meets the end of the capacity is cut to whole units."""
    sizes = []
    for tokens in remaining:
        size = tokens if tokens <= capacity else capacity // unit * unit
        sizes.append(size)
        capacity -= size
    return sizes


def equal_progress(remaining: Sequence[int], capacity: int, unit: int) -> list[int]:
    """One unit each, round after round, until nothing fits or nothing is left to do."""
    sizes = [0] * len(remaining)
    moving = True
    while moving:
        moving = False
        for turn, tokens in enumerate(remaining):
            step = min(unit, tokens - sizes[turn])
            if 0 < step <= capacity:
                sizes[turn] += step
                capacity -= step
                moving = True
    return sizes


CHUNKINGS: dict[str, Chunking] = {"whole": whole, "first_come": first_come, "equal_progress": equal_progress}
