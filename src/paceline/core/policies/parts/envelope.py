"""The envelope of a step: how long it may get, what is in it so far, how much more fits, and who may join."""

from __future__ import annotations

from functools import cache
from math import inf
from statistics import NormalDist

from paceline.core.desk import Desk
from paceline.core.policies.parts.promises import gap_s
from paceline.core.protocols import CostModel
from paceline.core.request import Request
from paceline.core.shape import StepShape

PART = 96  # tokens of a prompt, from which on a larger part hardly costs less apiece
ENOUGH = 0.75  # of the part that is waited for


class Envelope:
    """A step being filled. While no cost model is ready nobody can say how long it gets, and everything fits.

    The crowd are all who decode to a promised pace, now or as soon as their prompt is done: it may only grow as far as
    one step with all of them stays within the shortest of their gaps.
    """

    def __init__(self, desk: Desk) -> None:
        self.cost: CostModel | None = desk.cost if desk.cost is not None and desk.cost.ready else None
        self.limit_s = inf  # how long the step may get
        self.first_s = inf  # the earliest deadline of a first token that comes at its end
        self.percentile = 0.5  # share of such steps that must not take longer
        self.share = 1.0  # of the limit that a step should be expected to take at most
        self.spared_s = inf  # how long who has had more than others may make it: the rest is spared for those
        self.longest_s = 0.0  # how long a step may be expected to take once time was saved; 0: it cannot be saved
        self.shape = StepShape()
        self.prefilled = 0  # tokens of prompts in it
        self.full = False  # whether somebody wanted more time than was left
        self.under_way: list[Request] = []  # prompts begun and not done when it was opened, or begun in it
        self.gap_s = inf  # the shortest gap that is kept in the crowd
        self.crowded = False  # whether the crowd is too large already
        self._crowd = StepShape()

    def takes_s(self, shape: StepShape) -> float:
        """How long such a step takes at most, at the percentile. Only with a cost model."""
        assert self.cost is not None
        estimate = self.cost.predict(shape)
        return estimate.seconds + (estimate.high - estimate.seconds) * _margins(self.percentile)

    def needs_s(self, shape: StepShape, share: float) -> float:
        """How long such a step must be allowed: what it takes at most, and what it is expected to, by its share.

        Only with a cost model.
        """
        assert self.cost is not None
        estimate = self.cost.predict(shape)
        most_s = estimate.seconds + (estimate.high - estimate.seconds) * _margins(self.percentile)
        return max(most_s, estimate.seconds / share)

    def hold(self, rows: int, context: int) -> None:
        """Put in so many decodes, which read so many KV positions."""
        self.shape = with_decodes(self.shape, rows, context)

    def add(self, start: int, count: int) -> None:
        """Put in `count` tokens of a prompt from position `start` on."""
        self.shape = self.shape.plus(start, count)
        self.prefilled += count

    def most(self, start: int, wanted: int, *, sparing: bool = False) -> int:
        """How many of `wanted` tokens from position `start` on still fit. Times never fall as tokens are added.

        With `sparing`, in the time that is not spared for others.
        """
        if self.limit_s == inf or wanted <= 0:
            return wanted
        share = self.share
        if sparing and self.spared_s < share * self.limit_s:
            share = self.spared_s / self.limit_s
            if share <= 0.0:
                return 0
        high, high_s = wanted, self.needs_s(self.shape.plus(start, wanted), share)
        if high_s <= self.limit_s:
            return wanted
        low, low_s = 0, self.needs_s(self.shape, share)
        # Times are nearly straight in the tokens, so guesses by proportion close in from both sides; a few suffice.
        for _ in range(4):
            if low_s >= self.limit_s or high - low <= max(1, low // 64):
                break
            guess = low + int((high - low) * (self.limit_s - low_s) / (high_s - low_s))
            guess = min(max(guess, low + 1), high - 1)
            guess_s = self.needs_s(self.shape.plus(start, guess), share)
            if guess_s <= self.limit_s:
                low, low_s = guess, guess_s
            else:
                high, high_s = guess, guess_s
        return low

    def saves_for(self, size: int, start: int, wanted: int) -> bool:
        """Whether `size` tokens are few, and a later step could hold a part that is worth its while.

        Matrix multiplies need about `PART` rows to be fast, so several small parts cost more than a large one. Where
        tokens are held, a step that leaves prompts alone takes less than its readers take a token: the next may be
        longer by so much.
        """
        worth = min(PART, wanted)
        if self.cost is None or not self.longest_s or size >= worth:
            return False
        beside_s = self.cost.predict(self.shape).seconds
        more_s = self.cost.predict(self.shape.plus(start, worth)).seconds - beside_s
        reach = worth * (self.longest_s - beside_s) / more_s if more_s > 0.0 else worth
        return size < ENOUGH * min(worth, reach)

    def expects(self, start: int, count: int, *, sparing: bool = False) -> bool:
        """Whether the step is expected to be in time with `count` tokens more, however far it may be off."""
        limit_s = min(self.limit_s, self.spared_s) if sparing else self.limit_s
        return self.cost is not None and self.cost.predict(self.shape.plus(start, count)).seconds <= limit_s

    def rows(self, contexts: list[int]) -> int:
        """How many decodes with these contexts still fit, in their order."""
        if self.limit_s == inf:
            return len(contexts)
        if self.needs_s(with_decodes(self.shape, len(contexts), sum(contexts)), self.share) <= self.limit_s:
            return len(contexts)
        low, high = 0, len(contexts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            shape = with_decodes(self.shape, middle, sum(contexts[:middle]))
            fits = self.needs_s(shape, self.share) <= self.limit_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def gather(self, rows: int, context: int, gap_s: float, *, crowded: bool) -> None:
        """Count those who decode now, with the shortest gap that is kept among them, into the crowd."""
        self._crowd = with_decodes(self._crowd, rows, context)
        self.gap_s, self.crowded = gap_s, crowded

    def has_room(self, request: Request) -> bool:
        """Whether all in the crowd keep their pace beside one more."""
        if self.cost is None or gap_s(request) == inf:
            return True
        if self.gap_s == inf:
            return not self.crowded
        return self.takes_s(with_decodes(self._crowd, 1, request.known)) <= self.gap_s

    def join(self, request: Request) -> None:
        """Count one whose prompt is under way; his pace is to be kept if it can be."""
        self.under_way.append(request)
        gap = gap_s(request)
        if self.cost is None or gap == inf:
            return
        self._crowd = with_decodes(self._crowd, 1, request.known)
        if self.takes_s(self._crowd) <= gap < self.gap_s:
            self.gap_s = gap


def with_decodes(shape: StepShape, rows: int, context: int) -> StepShape:
    """With so many more rows of one token, which read so many KV positions."""
    return StepShape(shape.tokens + rows, shape.rows + rows, shape.context + context, shape.pairs)


@cache
def _margins(percentile: float) -> float:
    """How far above the median a percentile is, in terms of the 95th, which is the upper end of an estimate."""
    normal = NormalDist()
    return max(0.0, normal.inv_cdf(percentile) / normal.inv_cdf(0.95))
