"""orca: iteration-level batching with whole prefills and memory reserved for the maximum (Orca, OSDI 2022).

Protects against eviction: a request runs only when prompt and max_tokens fit beside everyone else's. Requests join and
leave at every step, but a long prompt is computed in one piece and everybody's next token waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import WorstCase


@dataclass(frozen=True)
class Orca(Policy):
    """First come, first served. It knows no token budget: a step is as long as the prompts that arrive make it."""

    def decide(self, desk: Desk) -> None:
        """Everyone who runs, then every newcomer whose worst case fits."""
        for request in desk.running:
            if request.todo:
                desk.grow(request, request.todo)
        reserve = WorstCase(desk)
        while desk.waiting and desk.room > 0:
            request = next(iter(desk.waiting.values()))
            if not reserve.admit(request, request.known):
                return
