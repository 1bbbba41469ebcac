"""What each replica is believed to hold in its prefix cache, from what was sent there.

An approximation on purpose: a router sees no evictions unless engines tell. It keeps the same order an engine does
(least recently used goes first, the deepest block of a chain before its parents) within the same capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class Holdings:
    """The prefix blocks of one cache, least recently used first. Names are chained: one name stands for a prefix."""

    def __init__(self, capacity: int | None = None) -> None:
        """Of at most `capacity` blocks; None is no bound."""
        self.capacity = capacity
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[Hashable]) -> int:
        """How many leading blocks are held. Does not count as a use."""
        held = self._blocks
        for depth, block in enumerate(blocks):
            if block not in held:
                return depth
        return len(blocks)

    def add(self, blocks: Sequence[Hashable]) -> None:
        """A prompt of these blocks was computed or read: they are the most recently used, the first one last to go."""
        held = self._blocks
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        if self.capacity is not None:
            while len(held) > self.capacity:
                held.popitem(last=False)

    def drop(self, blocks: Sequence[Hashable]) -> None:
        """Forget these, as an engine's eviction events tell."""
        for block in blocks:
            self._blocks.pop(block, None)
