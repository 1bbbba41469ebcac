"""prefill_first: a step prefills or decodes, never both; whoever waits goes first (what SGLang does).

Protects the time to first token, and throughput: prefills run in large chunks, back to back, while everyone who
generates stands still. `interval` and `mixed` soften that. Memory is given against an estimate of how much of
max_tokens will really be used (`ratio`), which sinks while all goes well and jumps when a request must be retracted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.capacity import fewest_outputs
from paceline.core.policies.parts.order import ORDERS, HighestResponseRatio, Order
from paceline.core.request import Request

CLIPPED_OUTPUT = 4096  # most tokens of max_tokens that the estimate takes seriously
DECAY_STEPS = 600  # decode steps in which the ratio sinks from its start to its floor
RETRACT_STEPS = 20  # decode steps that must fit after a retraction


@dataclass
class PrefillFirst(Policy):
    """Prefill XOR decode, one chunked request at a time."""

    chunk: int = 8192  # most prefill tokens of one step
    max_prefill_tokens: int = 16384
    order: str = "fcfs"  # or "lpm", "dfs_weight", "lof", "hrrn"
    conservativeness: float = 1.0
    mixed: bool = False  # whether decodes ride along with a prefill
    interval: int = 0  # decode steps after each prefill step; 0 is none
    _ratio: float = field(init=False)
    _decodes_due: int = field(init=False, default=0)
    _order: Order = field(init=False)

    def __post_init__(self) -> None:
        self._ratio = self._start_ratio
        self._order = ORDERS[self.order]()

    @property
    def _start_ratio(self) -> float:
        return min(0.7 * self.conservativeness, 1.0)

    def decide(self, desk: Desk) -> None:
        """Prefill if anyone can, else decode."""
        if not desk.running:
            self._ratio = self._start_ratio
        generating = [request for request in desk.running if not request.prefilling and request.todo]
        if not (self._decodes_due and generating):
            self._prefill(desk, beside=len(generating) if self.mixed else 0)
        if desk.rows:
            self._decodes_due = self.interval
            if not self.mixed:
                return
        else:
            self._decodes_due = max(0, self._decodes_due - 1)
        self._decode(desk, generating)

    def _prefill(self, desk: Desk, *, beside: int) -> None:
        left = min(self.chunk, self.max_prefill_tokens) - beside
        under_way = next((request for request in desk.running if request.prefilling and request.todo), None)
        if under_way is not None:
            size = min(under_way.todo, left)
            if size <= 0 or not desk.grow(under_way, size) or under_way.prefilling:
                return  # one chunked request at a time
            left -= size
        for request in self._order(desk):
            size = self._share(desk, request, left)
            if size <= 0 or desk.room <= 0 or not desk.admit(request, size):
                break
            left -= size
            if request.prefilling:
                break
        if isinstance(self._order, HighestResponseRatio):
            self._order.prefilled(min(self.chunk, self.max_prefill_tokens) - beside - left)

    def _share(self, desk: Desk, request: Request, left: int) -> int:
        """Tokens of a newcomer for this step; 0 when memory or chunk are used up."""
        size = desk.kv.block_size
        promised = sum(self._still_to_come(other) * self._ratio for other in desk.running)
        uncached = desk.uncached(request)
        needed = uncached + self._still_to_come(request) + size
        alone = not desk.running  # the estimate must not keep an empty engine from serving
        if needed >= desk.available_blocks * size - promised and not alone:
            return 0
        return uncached if uncached <= left else left // size * size

    def _still_to_come(self, request: Request) -> int:
        return min(request.limit - request.known, CLIPPED_OUTPUT)

    def _decode(self, desk: Desk, generating: list[Request]) -> None:
        def needed() -> int:
            return sum(desk.blocks_needed(request, request.planned + 1) for request in generating)

        if needed() <= desk.available_blocks:
            floor = 0.14 * self._start_ratio
            self._ratio = max(self._ratio - (self._start_ratio - floor) / DECAY_STEPS, floor)
        else:
            while len(desk.running) > 1 and self._short(desk, generating, needed()):
                loser = fewest_outputs(desk.running)
                desk.preempt(loser, to_tail=True)
                generating = [request for request in generating if request is not loser]
            done = sum(request.known - request.prompt_len for request in generating)
            most = sum(request.spec.sampling.max_tokens for request in generating)
            self._ratio = min(1.0, (done + RETRACT_STEPS * len(generating)) / (most + 1))
        for request in generating:
            desk.grow(request, 1)

    def _short(self, desk: Desk, generating: list[Request], needed: int) -> bool:
        ahead = desk.kv.blocks_for(len(generating) * RETRACT_STEPS) if desk.preempted else 0
        return max(needed, ahead) > desk.available_blocks
