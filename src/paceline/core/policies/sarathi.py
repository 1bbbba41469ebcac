"""sarathi: a fixed token budget a step, decodes first, prefill chunks fill the rest (Sarathi-Serve, OSDI 2024).

Protects decodes from stalls: every running request that generates gets its token in every step, and no step is longer
than the fixed chunk makes it. What it cannot do is know what that chunk should be.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import grow_or_evict, last_admitted
from paceline.core.policies.parts.knobs import knob


@dataclass(frozen=True)
class Sarathi(Policy):
    """Stall-free batching under a fixed chunk; first come, first served."""

    chunk: int = knob(512, least=1)  # tokens of a step, decodes included

    def decide(self, desk: Desk) -> None:
        """Decodes, then prefills under way, then newcomers."""
        desk.budget = min(desk.budget, self.chunk)
        generating = [request for request in desk.running if not request.prefilling]
        prefilling = [request for request in desk.running if request.prefilling]
        for request in (*generating, *prefilling):
            tokens = min(request.todo, desk.budget)
            if tokens > 0 and request.holds_kv:  # false for who gave way to an earlier one
                grow_or_evict(desk, request, tokens, last_admitted)
        while desk.waiting and desk.budget > 0 and desk.room > 0 and not desk.preempted:
            if not desk.admit(next(iter(desk.waiting.values())), desk.budget):
                return
