"""Who may stay: what memory an admission must find, and who gives way when it runs out."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.desk import Desk
from paceline.core.policies.parts.order import rank
from paceline.core.request import Request


class WorstCase:
    """Admit only who can run to its limit although everyone running does: nobody is ever evicted.

    Reserves prompt + max_tokens of everybody (Orca; TensorRT-LLM's GUARANTEED_NO_EVICT), less what is shared.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._free = desk.available_blocks - sum(map(desk.blocks_to_finish, desk.running))

    def admit(self, request: Request, most: int) -> bool:
        """Like `desk.admit`, if the worst case fits."""
        needed = self._desk.blocks_to_finish(request)
        if needed > self._free or not self._desk.admit(request, most):
            return False
        self._free -= needed
        return True

    def fits(self, request: Request, beside: int = 0) -> bool:
        """Whether it would, with `beside` more blocks promised to others."""
        return self._desk.blocks_to_finish(request) + beside <= self._free


Victim = Callable[[list[Request]], Request]


def last_admitted(running: list[Request]) -> Request:
    """Who came last has the least to lose (vLLM fcfs, TensorRT-LLM's MAX_UTILIZATION)."""
    return running[-1]


def lowest_priority(running: list[Request]) -> Request:
    """Highest priority number, of the class before its own, then latest arrival (vLLM priority)."""
    return max(running, key=rank)


def fewest_outputs(running: list[Request]) -> Request:
    """Fewest output tokens, of those the longest prompt, then the last to run (SGLang's retraction)."""
    return min(reversed(running), key=lambda request: (request.known - request.prompt_len, -request.prompt_len))


def grow_or_evict(desk: Desk, request: Request, tokens: int, victim: Victim) -> bool:
    """Give `request` its tokens, preempting victims until its blocks fit; False if it fell victim itself."""
    while not desk.grow(request, tokens):
        loser = victim(desk.running)
        desk.preempt(loser)
        if loser is request:
            return False
    return True
