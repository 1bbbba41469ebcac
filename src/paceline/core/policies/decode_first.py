"""decode_first: running requests before waiting ones, under one token budget (what vLLM does).

Protects the time between tokens of those who run: newcomers get what is left of the budget, in chunks, in the same
step. Memory is given optimistically, block by block; when it runs out, whoever was admitted last gives way and is
recomputed later, mostly from the prefix cache.
"""

from __future__ import annotations

from paceline.core.desk import Desk


class DecodeFirst:
    """First come, first served; preemption by recompute, last admitted first."""

    name = "decode_first"

    def decide(self, desk: Desk) -> None:
        """Fill the step."""
        running = desk.running
        turn = 0
        while turn < len(running) and desk.budget > 0:
            request = running[turn]
            tokens = min(request.todo, desk.budget)
            while tokens and not desk.grow(request, tokens):
                victim = running[-1]
                desk.preempt(victim)
                if victim is request:
                    return  # nobody after it is left, and memory is full: no admissions either
            turn += 1
        if desk.preempted:
            return  # what was freed belongs to those who still run
        while desk.waiting and desk.budget > 0 and desk.room > 0:
            request = next(iter(desk.waiting.values()))
            if not desk.admit(request, desk.budget):
                return  # strictly in order: nobody overtakes the head
