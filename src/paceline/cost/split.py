"""What the rows of a step are, as far as its shape tells: decodes beside one prefill, or beside several like ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.core.shape import StepShape


class Split(NamedTuple):
    """A step as decodes and `prefills` equal rows, each of `each` tokens from position `start` on."""

    decodes: int
    context: int  # KV positions that the decodes read
    seen: int  # KV positions that the prefills see, each counted once
    prefills: int
    each: float
    start: float
    pairs: int  # query-key pairs of the prefills

    @property
    def prefill_tokens(self) -> int:
        return round(self.prefills * self.each)

    def decode_window(self, window: int) -> int:
        """KV positions that the decodes read where a query sees at most `window`; contexts are taken as equal."""
        return min(self.context, self.decodes * window)

    def seen_window(self, window: int) -> int:
        """KV positions that the prefills see where a query sees at most `window`."""
        return min(self.seen, round(self.prefills * (self.each + window)))

    def pairs_window(self, window: int) -> int:
        """Query-key pairs of the prefills where a query sees at most `window`, itself included."""
        return round(self.prefills * (_seen(self.start + self.each, window) - _seen(self.start, window)))


def split(shape: StepShape) -> Split:
    """Take the prefill as one row if one explains the pairs, else as the fewest equal rows that do.

    A row of n tokens from s on has n * s + n * (n + 1) / 2 pairs. With p rows, n = 1 + (tokens - rows) / p; the fewest
    that leave s at or above 0 follow from setting s = 0: n ** 2 + (1 - q) * n + q = 0, q = 2 * pairs / (tokens - rows).
    Attention's work depends on the pairs alone; what is guessed is how much of `context` is the decodes'. For that the
    prefills count as one row in any case, which never takes more from the decodes than a row brings (so a step with
    one more row never looks cheaper), and is off by a small share of what several prefills cost.
    """
    tokens, rows, context, pairs = shape.tokens, shape.rows, shape.context, shape.pairs
    extra = tokens - rows  # tokens beyond one a row
    if pairs <= 0 or extra <= 0:
        return Split(rows, context, 0, 0, 0.0, 0.0, 0)
    prefills, count = 1, extra + 1.0
    if count * (count + 1.0) > 2.0 * pairs:
        q = 2.0 * pairs / extra
        longest = ((q - 1.0) + math.sqrt(max(0.0, (q - 1.0) ** 2 - 4.0 * q))) / 2.0
        prefills = min(rows, math.ceil(extra / max(longest - 1.0, 1.0) - 1e-9))
        count = 1.0 + extra / prefills
    start = max(0.0, pairs / (prefills * count) - (count + 1.0) / 2.0)
    decodes = rows - prefills
    merged = extra + 1.0
    left = context - round(pairs / merged + (merged - 1.0) / 2.0)
    left = min(context, max(decodes, left)) if decodes else 0
    return Split(decodes, left, context - left, prefills, count, start, pairs)


def _seen(position: float, window: int) -> float:
    """Pairs of a causal prefill of `position` tokens from 0 on, a query seeing at most `window` keys."""
    if position <= window:
        return position * (position + 1.0) / 2.0
    return window * (window + 1.0) / 2.0 + (position - window) * window
