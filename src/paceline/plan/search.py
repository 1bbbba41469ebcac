"""Searches over whole numbers, where what fits is known to fit for everything smaller."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n from 1 to `most` that fits, where all smaller ones do; 0: none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
