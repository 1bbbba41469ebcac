"""slo: the token budget of every step follows from the promise made to each request.

Everyone who generates gets a token in every step. The earliest of their next-token deadlines says how long the step may
take, the cost model says how many prefill tokens fit into that time, and those go to whoever's first token is due
first. When nobody generates, a step is as large as memory allows and as the next newcomer could bear. When decoding
alone is too slow for the promise, obeying would only starve newcomers: a step then takes twice what its decodes take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from paceline.core.classes import Overload
from paceline.core.desk import Desk
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.knobs import knob
from paceline.core.policies.parts.line import Line
from paceline.core.request import Request
from paceline.core.shape import StepShape
from paceline.core.step import Bound, Rejected, RejectReason


class Late(Enum):
    """How a request stands in line."""

    NO = "no"  # its first token can come in time
    SHARE = "share"  # it cannot, and is served from the share kept for those
    YES = "yes"  # it cannot, and nobody else wants the time


@dataclass
class Slo(Policy):
    """Holds stated times to first token and between tokens, for as many as can have them."""

    pace: str = knob(
        "gap", one_of=("gap", "timeline")
    )  # every gap meets itl; timeline: tokens delivered early build up slack
    floor: int = knob(
        16, least=1
    )  # prefill tokens that go ahead at least every `patience` steps, whatever the deadlines say
    patience: int = knob(8, least=1)
    untested_budget: int = knob(128, least=1)  # prefill tokens of a step while the cost model is not ready
    step_share: float = knob(
        0.5, least=0.01, most=1.0
    )  # share of the tightest ttft that one step may take: who comes during it has to wait
    late_share: float = knob(
        0.1, least=0.0, most=1.0
    )  # share of the prefill tokens kept for late requests, so that they age out of waiting
    stretch: float = knob(
        2.0, least=1.0
    )  # when the promise cannot be kept: a step takes at most this many times its decodes
    partial: int = knob(4, least=1)  # prompts that may be under way at once; each holds memory and gives nothing yet
    _line: Line = field(init=False, default_factory=Line)
    _credit: float = field(init=False, default=0.0)  # prefill tokens late requests are owed
    _starving: int = field(init=False, default=0)  # steps in a row in which prefills waited and got nothing
    _backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._backlog = Backlog()

    def arrive(self, desk: Desk, request: Request) -> Rejected | None:
        """Refuse whose first token cannot come in time, if their class says so; else stand them in line."""
        if request.kind.overload is Overload.REJECT and request.deadline_s < inf:
            wait_s = self._backlog.wait_s(desk, request)
            late_s = desk.now + wait_s - request.deadline_s
            if late_s > 0:
                message = f"the first token would come {late_s:.2g} s after its deadline: come back later"
                return Rejected(request.request_id, RejectReason.OVERLOADED, message, retry_after_s=late_s)
        self._line.add(request, request.deadline_s)
        return None

    def decide(self, desk: Desk) -> None:
        """Decodes, then as many prefill tokens as the tightest deadline leaves time for."""
        shape = self._decode(desk)
        limit_s = self._limit_s(desk, shape)
        prefilled = 0
        for request, late in self._turns(desk):
            start = request.planned if request.holds_kv else request.known - desk.uncached(request)
            wanted = request.known - start
            if late is Late.SHARE:
                wanted = min(wanted, max(1, int(self._credit)))
            size = self._size(desk, shape, start, min(wanted, desk.budget), limit_s)
            if size < wanted:
                desk.bound_by = Bound.DEADLINE if size < desk.budget else Bound.BUDGET
            if size <= 0:
                break
            if not self._give(desk, request, size):
                desk.bound_by = Bound.MEMORY
                break
            shape = shape.plus(start, size)
            prefilled += size
            self._credit += self.late_share * size if late is Late.NO else -size
            self._line.charge(request, size)
            if size < wanted:
                break
            if late is Late.NO:  # its first token comes at the end of this step, which must not be too late for it
                limit_s = min(limit_s, request.deadline_s - desk.now)
        self._credit = max(0.0, min(self._credit, 4096.0))
        self._starving = 0 if prefilled or desk.bound_by is Bound.NOTHING else self._starving + 1
        if desk.cost is not None and desk.cost.ready and desk.rows:
            desk.predicted_s = desk.cost.predict(shape).seconds
            self._backlog.saw(prefilled, desk.predicted_s)

    def _decode(self, desk: Desk) -> StepShape:
        rows = context = 0
        for request in tuple(desk.running):
            if request.prefilling or not request.todo or not request.holds_kv:
                continue
            while not desk.grow(request, 1):
                victim = self._victim(desk)
                desk.preempt(victim)
                self._line.add(victim, self._next_token_s(victim))
                if victim is request:
                    break
            if request.holds_kv and self._line.shared(request.kind.name):
                self._line.charge(request, 1)
        for request in desk.rows:
            rows += 1
            context += request.planned
        return StepShape(rows, rows, context, 0)

    def _next_token_s(self, request: Request) -> float:
        """Deadline of the next token of a request: the first one's, or a gap after the last."""
        if request.first_token_s is None:
            return request.deadline_s
        gap = inf if request.itl_s is None else request.itl_s
        if request.e2e_s is not None:
            left = request.arrived_s + request.e2e_s - request.last_token_s
            gap = min(gap, max(left, 0.0) / max(1, request.limit - request.known))
        if self.pace == "timeline":
            return request.first_token_s + gap * (request.known - request.prompt_len)
        return request.last_token_s + gap

    def _limit_s(self, desk: Desk, decodes: StepShape) -> float:
        """How long this step may take; inf while nobody can say."""
        if desk.cost is None or not desk.cost.ready:
            return inf
        waiting = (request.deadline_s - request.arrived_s for request in desk.waiting.values())
        newcomer_s = self.step_share * min(desk.tightest_ttft_s, min(waiting, default=inf))
        if not desk.rows:
            return newcomer_s
        due_s = min(map(self._next_token_s, desk.rows)) - desk.now
        alone_s = desk.cost.predict(decodes).high
        return min(due_s if due_s >= alone_s else self.stretch * alone_s, newcomer_s)

    def _size(self, desk: Desk, shape: StepShape, start: int, most: int, limit_s: float) -> int:
        """The most tokens of a prefill from `start` on that keep the step within its limit."""
        if desk.cost is None or not desk.cost.ready:
            return min(most, self.untested_budget) if desk.rows else most
        if limit_s == inf:
            return most
        low, high = 0, most  # predicted times never fall as tokens are added
        while low < high:
            middle = (low + high + 1) // 2
            if desk.cost.predict(shape.plus(start, middle)).high <= limit_s:
                low = middle
            else:
                high = middle - 1
        nobody_yet = shape.tokens == shape.rows  # no prefill in this step so far
        if nobody_yet and (self._starving >= self.patience or not desk.rows):
            low = max(low, min(self.floor, most))
        return low

    def _turns(self, desk: Desk) -> Iterator[tuple[Request, Late]]:
        """Prompts under way and waiting requests in order of urgency."""

        def makes_it(request: Request) -> bool:
            return request.deadline_s == inf or desk.now + self._backlog.own_s(desk, request) <= request.deadline_s

        under_way = [request for request in desk.running if request.prefilling and request.todo]
        under_way.sort(key=lambda request: (request.deadline_s, request.arrived_s))
        punctual = [request for request in under_way if makes_it(request)]
        late = [request for request in under_way if not makes_it(request)]
        begun = len(under_way)
        while desk.budget > 0:
            may_begin = desk.room > 0 and begun < self.partial
            head = self._line.punctual(makes_it) if may_begin else None
            if punctual and (head is None or not self._line.before(head, punctual[0])):
                head = punctual[0]
            aside = late[0] if late else self._line.late() if may_begin else None
            if aside is not None and (head is None or self._credit >= self.floor):
                begun += not aside.holds_kv
                del late[:1]
                yield aside, Late.YES if head is None else Late.SHARE
            elif head is not None:
                begun += not head.holds_kv
                if punctual and head is punctual[0]:
                    del punctual[0]
                yield head, Late.NO
            else:
                return

    def _give(self, desk: Desk, request: Request, size: int) -> bool:
        if request.holds_kv:
            return desk.grow(request, size)
        # Each who runs may soon need one more block: admitting into the last of them would only evict somebody.
        spare = desk.available_blocks - len(desk.running)
        if desk.running and desk.blocks_needed(request, request.known) > spare:
            return False
        return desk.admit(request, size)

    def _victim(self, desk: Desk) -> Request:
        """Who has the most slack for each token that must be computed again; nobody is chosen over and over."""

        def worth(request: Request) -> tuple[float, float]:
            slack_s = self._next_token_s(request) - desk.now
            cost = (request.planned + 1) * (1 + request.preemptions)
            return (slack_s / cost if slack_s < inf else inf, -cost)

        return max(desk.running, key=worth)


class Backlog:
    """How fast prefills go, and so how long a newcomer will wait."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0  # smoothed over recent steps with a prefill

    def saw(self, tokens: int, seconds: float) -> None:
        """A step gave `tokens` prefill tokens and takes `seconds`."""
        if tokens and seconds > 0.0:
            rate = tokens / seconds
            self._tokens_per_s += 0.1 * (rate - self._tokens_per_s) if self._tokens_per_s else rate

    def own_s(self, desk: Desk, request: Request) -> float:
        """Seconds that the request's own prefill will take; 0 while nobody knows."""
        if desk.cost is None or not desk.cost.ready:
            return 0.0
        start = request.planned if request.holds_kv else request.known - desk.uncached(request)
        alone_s = desk.cost.predict(StepShape().plus(start, request.known - start)).seconds
        if not desk.rows or not self._tokens_per_s:
            return alone_s
        return max(alone_s, (request.known - start) / self._tokens_per_s)

    def wait_s(self, desk: Desk, request: Request) -> float:
        """Seconds until its first token if it joins now: those due before it, then itself."""
        own_s = self.own_s(desk, request)
        if not self._tokens_per_s:
            return own_s
        ahead = sum(
            other.known - other.planned
            for others in (desk.running, desk.waiting.values())
            for other in others
            if other.prefilling and other.deadline_s <= request.deadline_s
        )
        return ahead / self._tokens_per_s + own_s
