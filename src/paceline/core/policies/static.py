"""static and dynamic: a batch closes, then runs to its end; nobody joins on the way (classic request-level batching).

Protects the batch's own rhythm: once it runs nothing disturbs it, and everyone else waits for its longest member.
`static` closes when the batch is full, `dynamic` when it is full or the oldest has waited for the delay (Triton's
dynamic batcher). A static batch that never fills closes after `delay_s`, so that the last requests of a day end.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import WorstCase
from paceline.core.policies.parts.knobs import knob


@dataclass(frozen=True)
class Dynamic(Policy):
    """Closes a batch on size or delay."""

    batch_size: int = knob(8, least=1)
    delay_s: float = knob(0.05, least=0.0)  # of the oldest

    def decide(self, desk: Desk) -> None:
        """Run the closed batch; when it has ended, wait for the next one to close."""
        for request in desk.running:
            if request.todo:
                desk.grow(request, request.todo)
        if desk.running or not desk.waiting:
            return
        size = min(self.batch_size, desk.room)
        closes_s = min(request.arrived_s for request in desk.waiting.values()) + self.delay_s
        if len(desk.waiting) < size and desk.now < closes_s:
            desk.call_again_at(closes_s)
            return
        reserve = WorstCase(desk)
        for request in list(desk.waiting.values())[:size]:
            if not reserve.admit(request, request.known):
                return


@dataclass(frozen=True)
class Static(Dynamic):
    """Closes a batch when it is full."""

    delay_s: float = knob(10.0, least=0.0)
