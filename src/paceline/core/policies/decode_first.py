"""decode_first: running requests before waiting ones, under one token budget (what vLLM does).

Protects the time between tokens of those who run: newcomers get what is left of the budget, in chunks, in the same
step. Memory is given optimistically, block by block; when it runs out, whoever was admitted last gives way and is
recomputed later, mostly from the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import grow_or_evict, last_admitted, lowest_priority
from paceline.core.policies.parts.knobs import knob
from paceline.core.policies.parts.order import by_priority, fcfs


@dataclass(frozen=True)
class DecodeFirst(Policy):
    """First come, first served or by priority; preemption by recompute."""

    order: str = knob(
        "fcfs", one_of=("fcfs", "priority")
    )  # priority: lower numbers first, and the highest number is the victim
    long_prefill_threshold: int = knob(0, least=0)  # most prefill tokens of one request in a step; 0 is no bound
    watermark: float = knob(
        0.0, least=0.0, most=1.0
    )  # share of all blocks that an admission must leave free while something runs
    chunked: bool = True  # whether a prompt that does not fit the budget is cut
    reserve_whole: bool = True  # whether an admission needs room for all it knows, or for its first chunk alone

    def decide(self, desk: Desk) -> None:
        """Fill the step."""
        prioritised = self.order == "priority"
        victim = lowest_priority if prioritised else last_admitted
        most = self.long_prefill_threshold or desk.budget
        for request in tuple(desk.running):
            tokens = min(request.todo, most, desk.budget)
            if tokens > 0 and request.holds_kv:  # false for who gave way to an earlier one
                grow_or_evict(desk, request, tokens, victim)
        if desk.preempted:
            return  # what was freed belongs to those who still run
        spare = int(self.watermark * desk.kv.pool.num_blocks)
        for request in (by_priority if prioritised else fcfs)(desk):
            if desk.budget <= 0 or desk.room <= 0:
                return
            if not self.chunked and desk.rows and desk.uncached(request) > desk.budget:
                return
            if spare and desk.running and desk.blocks_needed(request, request.known) + spare > desk.available_blocks:
                return
            size = min(most, desk.budget) if self.chunked else request.known
            if not desk.admit(request, size, whole=self.reserve_whole):
                return  # strictly in order: nobody overtakes the head
