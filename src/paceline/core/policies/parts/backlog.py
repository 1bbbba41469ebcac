"""The backlog: how fast prompts are computed, and so how long a newcomer will wait."""

from __future__ import annotations

from math import inf

from paceline.core.desk import Desk
from paceline.core.request import Request
from paceline.core.shape import StepShape
from paceline.core.step import Bound

SMOOTHING = 0.1  # weight of the newest step in the rate


class Backlog:
    """Keeps a rate of prefill."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0  # smoothed over recent steps that prompts filled
        self._long_run_per_s = 0.0  # the same, over those that had no time for prompts, too

    def saw(self, tokens: int, seconds: float, bound_by: Bound) -> None:
        """A step gave `tokens` prefill tokens and takes `seconds`; what kept it from taking more.

        One that had room left says how little there was to do, and nothing against a higher rate.
        """
        if seconds <= 0.0:
            return
        rate, known = tokens / seconds, self._tokens_per_s
        if tokens and (bound_by is not Bound.NOTHING or rate > known):
            self._tokens_per_s += SMOOTHING * (rate - known) if known else rate
        known = self._long_run_per_s
        if bound_by in (Bound.DEADLINE, Bound.BUDGET) or rate > known:
            self._long_run_per_s += SMOOTHING * (rate - known) if known else rate

    def own_s(self, desk: Desk, request: Request) -> float:
        """Seconds that the request's own prefill will take; 0 while nobody knows."""
        if desk.cost is None or not desk.cost.ready:
            return 0.0
        start = request.planned if request.holds_kv else request.known - desk.uncached(request)
        alone_s = desk.cost.predict(StepShape().plus(start, request.known - start)).seconds
        if not desk.rows or not self._tokens_per_s:
            return alone_s
        return max(alone_s, (request.known - start) / self._tokens_per_s)

    def makes_it(self, desk: Desk, request: Request, ahead: int = 0) -> bool:
        """Whether its first token can come in time, if it is served at once, or after so many tokens of others."""
        if request.deadline_s == inf:
            return True
        wait_s = ahead / self._tokens_per_s if ahead and self._tokens_per_s else 0.0
        return desk.now + wait_s + self.own_s(desk, request) <= request.deadline_s

    def wait_s(self, desk: Desk, request: Request) -> float:
        """Seconds until its first token if it joins now: those due before it that are not late yet, then itself."""
        own_s = self.own_s(desk, request)
        if not own_s:
            return 0.0  # nobody knows yet
        ahead = sum(
            other.known - other.planned
            for others in (desk.running, desk.waiting.values())
            for other in others
            if other.prefilling and due_before(other, request, desk.now)
        )
        return ahead / (self._long_run_per_s or request.known / own_s) + own_s


def due_before(other: Request, request: Request, now: float) -> bool:
    """Whether another is to have its first token before the request's, and can still be in time."""
    if other is request or other.deadline_s <= now:
        return False
    return (other.deadline_s, other.arrived_s) <= (request.deadline_s, request.arrived_s)
