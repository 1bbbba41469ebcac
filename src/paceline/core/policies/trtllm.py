"""no_evict, max_utilization, static_batch: a capacity stage, then a micro-batch stage (what TensorRT-LLM does).

The first stage says who may run, by memory; the second how many tokens each gets, generation before context. Chunking
is off by default, so a prompt goes as a whole or the line stops at it; `first_come` cuts the one that meets the end of
the budget, `equal_progress` gives every prompt one unit in turn.

no_evict protects those who run: admission reserves their worst case, and nobody is ever paused.
static_batch adds that newcomers wait until all who run have ended.
max_utilization protects throughput: it admits by the next step's need and pauses the last started when that fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import WorstCase, last_admitted
from paceline.core.policies.parts.chunking import CHUNKINGS
from paceline.core.policies.parts.knobs import knob
from paceline.core.request import Request


@dataclass(frozen=True)
class NoEvict(Policy):
    """GUARANTEED_NO_EVICT: worst case reserved, nobody paused."""

    chunking: str = knob("whole", one_of=CHUNKINGS)
    unit: int = knob(64, least=1)  # tokens a chunk is rounded down to when it is cut
    max_num_tokens: int = knob(8192, least=1)  # token budget of a step

    def decide(self, desk: Desk) -> None:
        """Capacity, then sizes."""
        reserve = WorstCase(desk)
        fitting: list[Request] = []
        promised = 0
        for request in self._newcomers(desk):
            if len(fitting) >= desk.room or not reserve.fits(request, promised):
                break
            promised += desk.blocks_to_finish(request)
            fitting.append(request)
        give(desk, fitting, self, whole=True)

    def _newcomers(self, desk: Desk) -> list[Request]:
        return list(desk.waiting.values())


@dataclass(frozen=True)
class StaticBatch(NoEvict):
    """STATIC_BATCH: a new batch only when the old one has drained."""

    def _newcomers(self, desk: Desk) -> list[Request]:
        return [] if desk.running else list(desk.waiting.values())


@dataclass(frozen=True)
class MaxUtilization(Policy):
    """MAX_UTILIZATION: as many as one more step has blocks for."""

    chunking: str = knob("whole", one_of=CHUNKINGS)
    unit: int = knob(64, least=1)
    max_num_tokens: int = knob(8192, least=1)

    def decide(self, desk: Desk) -> None:
        """Walk in order of arrival; who does not fit pauses the last started behind it."""
        taken = 0  # blocks this step will use
        turn = 0
        while turn < len(desk.running):
            request = desk.running[turn]
            needed = desk.blocks_needed(request, request.planned + min(request.todo, self.max_num_tokens))
            if taken + needed <= desk.available_blocks:
                taken += needed
                turn += 1
            else:
                desk.preempt(last_admitted(desk.running))
        fitting: list[Request] = []
        for request in () if desk.preempted else desk.waiting.values():
            needed = desk.blocks_needed(request, request.known)
            if len(fitting) >= desk.room or taken + needed > desk.available_blocks:
                break
            taken += needed
            fitting.append(request)
        give(desk, fitting, self, whole=False)


def give(desk: Desk, newcomers: list[Request], knobs: NoEvict | MaxUtilization, *, whole: bool) -> None:
    """The micro-batch stage: a token to all who generate, then chunks of what is left of the budget."""
    capacity = knobs.max_num_tokens
    for request in desk.running:
        if not request.prefilling and 0 < request.todo <= capacity:
            desk.grow(request, request.todo)
            capacity -= 1
    contexts = [*(request for request in desk.running if request.prefilling and request.todo), *newcomers]
    remaining = [request.todo if request in desk.running else desk.uncached(request) for request in contexts]
    if knobs.chunking == "whole" and remaining and not desk.rows:
        capacity = max(capacity, remaining[0])  # a prompt beyond the budget would wait for ever: it goes alone
    sizes = CHUNKINGS[knobs.chunking](remaining, capacity, knobs.unit)
    for request, size in zip(contexts, sizes, strict=True):
        if size <= 0:
            continue
        if request in desk.running:
            desk.grow(request, size)
        elif not desk.admit(request, size, whole=whole):
            return
