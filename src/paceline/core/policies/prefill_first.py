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
from paceline.core.policies.parts.knobs import knob
from paceline.core.policies.parts.order import ORDERS, HighestResponseRatio, Order
from paceline.core.request import Request

CLIPPED_OUTPUT = 4096  # most tokens of max_tokens that the estimate takes seriously
DECAY_STEPS = 600  # decode steps in which the ratio sinks from its start to its floor
RETRACT_STEPS = 20  # decode steps that must fit after a retraction


@dataclass
class PrefillFirst(Policy):
    """Prefill XOR decode, one chunked request at a time."""

    chunk: int = knob(8192, least=0)  # most prefill tokens of one step; 0: prompts are never cut
    max_prefill_tokens: int = knob(16384, least=1)  # the same bound for prompts that are not cut; the first may exceed
    order: str = knob("fcfs", one_of=ORDERS)
    conservativeness: float = knob(1.0, least=0.0)  # scales the estimate: more holds more memory back for outputs
    mixed: bool = False  # whether decodes ride along with a prefill
    interval: int = knob(0, least=0)  # decode steps after each prefill step
    _ratio: float = field(init=False)
    _decodes_due: int = field(init=False, default=0)
    _full_at: int | None = field(init=False, default=None)  # with so many running, memory ended; until one leaves
    _order: Order = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ratio = self._start_ratio
        self._order = ORDERS[self.order]()

    @property
    def _start_ratio(self) -> float:
        return min(0.7 * self.conservativeness, 1.0)

    def arrive(self, desk: Desk, request: Request) -> None:
        """Note what has been computed so far, for the order that ages by it."""
        if isinstance(self._order, HighestResponseRatio):
            self._order.arrived(request)

    def decide(self, desk: Desk) -> None:
        """Prefill if anyone can, else decode."""
        if not desk.running:
            self._ratio = self._start_ratio
        if self._full_at is not None and len(desk.running) < self._full_at:
            self._full_at = None
        generating = [request for request in desk.running if not request.prefilling and request.todo]
        if not (self._decodes_due and generating):
            before = desk.budget
            self._prefill(desk, beside=len(generating) if self.mixed else 0)
            if isinstance(self._order, HighestResponseRatio):
                self._order.prefilled(before - desk.budget)
        if desk.rows:
            self._decodes_due = self.interval
            if not self.mixed:
                return
        else:
            self._decodes_due = max(0, self._decodes_due - 1)
        self._decode(desk, generating)

    def _prefill(self, desk: Desk, *, beside: int) -> None:
        left = min(self.chunk or self.max_prefill_tokens, self.max_prefill_tokens) - beside
        under_way = next((request for request in desk.running if request.prefilling and request.todo), None)
        promised = sum(self._still_to_come(other) * self._ratio for other in desk.running if other is not under_way)
        if under_way is not None:
            size = min(under_way.todo, left)
            if size <= 0 or not desk.grow(under_way, size) or under_way.prefilling:
                return  # one chunked request at a time
            left -= size
            promised += self._still_to_come(under_way)
        for request in self._order(desk) if self._full_at is None else ():
            size = self._share(desk, request, left, promised)
            if size <= 0 or desk.room <= 0 or not desk.admit(request, size):
                break
            if request.prefilling:
                break
            left -= size
            promised += self._still_to_come(request)

    def _share(self, desk: Desk, request: Request, left: int, promised: float) -> int:
        """Tokens of a newcomer for this step; 0 when memory or chunk are used up."""
        size = desk.kv.block_size
        needed = desk.blocks_needed(request, request.known) * size + self._still_to_come(request) + size
        # The estimate must not keep an empty engine from serving.
        if needed >= desk.available_blocks * size - promised and desk.running:
            self._full_at = len(desk.running)
            return 0
        uncached = desk.uncached(request)
        if uncached <= left or (not self.chunk and not desk.rows):
            return uncached
        if not self.chunk:
            return 0
        return left // size * size or (0 if desk.rows else left)  # cut to whole blocks, unless that leaves nothing

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
                # Prompts under way have the fewest outputs of all, and go only when nobody else can.
                others = [request for request in desk.running if request not in generating]
                loser = fewest_outputs(generating if len(generating) > 1 else others)
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
