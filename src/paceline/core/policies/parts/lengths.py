"""How long answers are: what classes have said lately, and so how much a request may still say."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from math import ceil

from paceline.core.request import Request

REMEMBERED = 128  # answers of a class


class Lengths:
    """Keeps the lengths of the newest answers of each class, in tokens."""

    def __init__(self) -> None:
        self._newest: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def saw(self, request: Request) -> None:
        """An answer came to its own end."""
        newest = self._newest.setdefault(request.kind.name, deque())
        ordered = self._sorted.setdefault(request.kind.name, [])
        if len(newest) == REMEMBERED:
            del ordered[bisect_right(ordered, newest.popleft()) - 1]
        length = request.known - request.prompt_len
        newest.append(length)
        insort(ordered, length)

    def left(self, request: Request, quantile: float) -> int:
        """Tokens that it will still say at most, in this share of cases; no more than it may.

        Of the answers of its class, those count that were longer than it is by now. One that has outgrown all of them
        may become twice as long; where none is known, as long as it asked for.
        """
        said, most = request.known - request.prompt_len, request.limit - request.known
        ordered = self._sorted.get(request.kind.name)
        if not ordered:
            return most
        shorter = bisect_right(ordered, said)
        if shorter == len(ordered):
            return min(most, max(1, said))
        return min(most, ordered[shorter + ceil(quantile * (len(ordered) - shorter)) - 1] - said)
