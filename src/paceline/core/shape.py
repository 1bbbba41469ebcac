"""The shape of a step: what its time depends on, before anybody has computed it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """Amounts of work in one step.

    `pairs` counts query-key pairs of rows with more than one token: a prefill of n tokens from position s on attends
    to s + 1, s + 2, ... s + n keys, n * s + n * (n + 1) / 2 in all. Decodes read their context once and are in
    `context` alone.
    """

    tokens: int = 0  # computed, over all rows
    rows: int = 0
    context: int = 0  # KV positions read, over all rows
    pairs: int = 0  # query-key pairs of prefills

    def plus(self, start: int, count: int) -> StepShape:
        """With one more row of `count` tokens from position `start` on."""
        end = start + count
        pairs = count * start + count * (count + 1) // 2 if count > 1 else 0
        return StepShape(self.tokens + count, self.rows + 1, self.context + end, self.pairs + pairs)


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a whole plan."""
    tokens, rows = sum(plan.counts), len(plan.counts)
    pairs = 0
    if tokens > rows:
        for start, count in zip(plan.starts, plan.counts, strict=True):
            if count > 1:
                pairs += count * start + count * (count + 1) // 2
    return StepShape(tokens, rows, sum(plan.starts) + tokens, pairs)
