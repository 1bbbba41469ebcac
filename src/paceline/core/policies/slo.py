"""slo: the token budget of every step follows from the promise made to each request.

A step holds, in this order and as far as its time allows:

    1. a token for everyone who was promised when it comes. The earliest of these deadlines says how long the step may
       get; the cost model says how many more tokens that is
    2. prompts whose first token can still come in time, the earliest deadline first
    3. a token for the others who generate
    4. what is left: prompts that are late already, and those that were promised nothing

A share of 2. is kept for 4., and whoever got nothing for many steps gets a little: nobody starves. When nobody
generates, a step is as large as memory allows and as the next newcomer could bear. Nobody begins whose decoding would
cost others their promise; whoever finds no seat or memory takes it from a class of lower priority. When decoding even
one alone is too slow for the promise, obeying would only starve newcomers: a step then takes twice its decodes' time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from paceline.core.classes import Overload
from paceline.core.desk import Desk
from paceline.core.pace import Pace
from paceline.core.policies.base import Policy
from paceline.core.policies.parts.aside import Aside
from paceline.core.policies.parts.backlog import Backlog
from paceline.core.policies.parts.envelope import Envelope
from paceline.core.policies.parts.knobs import knob
from paceline.core.policies.parts.lengths import Lengths
from paceline.core.policies.parts.line import Line
from paceline.core.policies.parts.places import Places
from paceline.core.policies.parts.promises import gap_s, next_token_s, slack_per_token
from paceline.core.policies.parts.room import Room
from paceline.core.request import Request
from paceline.core.shape import StepShape
from paceline.core.step import Bound, FinishReason, Rejected, RejectReason

# A share of the gaps may be late, which of a short answer's is none: aim so much lower, less where tokens are held.
FEW_GAPS, FEW_GAPS_HELD = 10.0, 2.5
EARLY = 0.9  # of the promised gap: tokens held are shown so long apart
SPENT = 0.8  # of the time to the earliest deadline that a step is expected to take, where tokens are held
LONGEST = 2.0  # promised gaps that a step takes at most, whatever is held: whoever comes meanwhile waits
SPARED = 2.0  # promised gaps of saved time that a tenant who is ahead leaves to those who are behind
SAVING = 3  # steps in a row that may hold no part of a prompt, to save their time for a larger one
CHARGED = 16  # decoded tokens are charged to their tenant so many at a time


@dataclass
class Slo(Policy):
    """Holds stated times to first token and between tokens, for as many as can have them."""

    # even: every gap that a reader sees meets itl, tokens that come early are held to bridge pauses; gap: every gap
    # meets itl as they are made; timeline: the n-th token is due n gaps after the first
    pace: str = knob("even", one_of=("even", "gap", "timeline"))
    hold: int = knob(8, least=1)  # tokens kept back at most when pace is even
    floor: int = knob(16, least=1)  # tokens that go ahead at least every `patience` steps, whatever the deadlines say
    patience: int = knob(32, least=1)
    untested_budget: int = knob(128, least=1)  # prefill tokens of a step while the cost model is not ready
    step_share: float = knob(0.5, least=0.01, most=1.0)  # of the tightest ttft: who comes during a step has to wait
    late_share: float = knob(0.1, least=0.01, most=1.0)  # of the prefill tokens, kept for those who are late
    stretch: float = knob(2.0, least=1.0)  # when the promise cannot be kept: a step is at most this many decode steps
    partial: int = knob(4, least=1)  # prompts that may be under way at once; each holds memory and gives nothing yet
    displace: int = knob(2, least=0)  # times a request may lose its place to one of a class of higher priority
    _room: Room = field(init=False)
    _line: Line = field(init=False, default_factory=Line)
    _backlog: Backlog = field(init=False, default_factory=Backlog)
    _aside: Aside = field(init=False)
    _lengths: Lengths = field(init=False, default_factory=Lengths)
    _places: Places = field(init=False)
    _starving: int = field(init=False, default=0)  # steps in a row in which prompts wanted time and got none
    _silent: int = field(init=False, default=0)  # the same for those who generate and were promised nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        self._room = Room(self.displace, self._evict, self._slack)
        self._aside = Aside(self._line, self.partial)
        share = SPENT if self.pace == "even" else 1.0
        self._places = Places(self._lengths, self._backlog, self._held_to, share)

    def arrive(self, desk: Desk, request: Request) -> Rejected | None:
        """Refuse whose first token cannot come in time, if their class says so; else stand them in line."""
        self._places.spare(request)
        if request.kind.overload is Overload.REJECT and request.deadline_s < inf:
            late_s = desk.now + self._places.first_token_s(desk, request) - request.deadline_s
            if late_s > 0:
                message = f"the first token would come {late_s:.2g} s after its deadline: come back later"
                return Rejected(request.request_id, RejectReason.OVERLOADED, message, retry_after_s=late_s)
        self._line.add(request)
        return None

    def retry_after_s(self, desk: Desk, queue: list[Request]) -> float:
        """When the first of them is expected to have its first token."""
        first = min(queue, key=lambda request: (request.deadline_s, request.arrived_s), default=None)
        return (0.0 if first is None else self._places.first_token_s(desk, first)) or super().retry_after_s(desk, queue)

    def _held_to(self, request: Request) -> float:
        """The share of steps that must be in time for the promise of its class, more strictly than that."""
        strict = FEW_GAPS_HELD if self.pace == "even" else FEW_GAPS
        return 1.0 - (1.0 - request.kind.percentile) / strict

    def pace_of(self, request: Request) -> Pace | None:
        """A promised gap is kept by showing tokens evenly; a little faster than promised, since delivery takes time."""
        if self.pace != "even" or request.itl_s is None:
            return None
        return Pace(EARLY * request.itl_s, self.hold)

    def leave(self, request: Request, reason: FinishReason) -> None:
        """Take it out of the line."""
        self._line.end(request)
        self._aside.leave(request)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.saw(request)

    def decide(self, desk: Desk) -> None:
        """Fill the step."""
        promised: list[Request] = []
        others: list[Request] = []
        under_way: list[Request] = []
        for request in desk.running:
            todo = request.todo
            if todo > 1 or (todo and request.planned < request.prompt_len):
                under_way.append(request)
            elif todo:
                (promised if request.itl_s is not None or request.e2e_s is not None else others).append(request)
        self._decode(desk, promised)
        step = self._open(desk, promised)
        urgent: list[Request] = []
        late: list[Request] = []
        # Aside, age for each token to come decides: short ones first, but all age.
        under_way.sort(key=lambda request: (desk.now - request.arrived_s) / (request.known - request.planned))
        for request in under_way:
            step.join(request)
            (urgent if self._is_urgent(desk, request) else late).append(request)
        self._aside.open(late)
        if self._aside.credit >= self.floor:
            self._serve_aside(desk, step, int(self._aside.credit))
        punctual = self._serve_in_time(desk, step, urgent, max(self.floor, desk.budget - len(others)))
        if punctual and step.cost is not None:
            # Those who only fill the step up must not hold first tokens back to the last moment.
            step.limit_s = min(step.limit_s, self.step_share * step.first_s)
        self._decode_others(desk, step, others)
        self._serve_aside(desk, step, desk.budget)
        self._aside.owe(self.late_share * punctual)
        self._starving = 0 if step.prefilled or desk.bound_by is Bound.NOTHING else self._starving + 1
        if not desk.rows and under_way:
            self._unlock(desk, step)
        if step.cost is not None and desk.rows:
            desk.predicted_s = step.cost.predict(step.shape).seconds
            self._backlog.saw(step.prefilled, desk.predicted_s, desk.bound_by)
            if promised:
                self._places.saw(desk.predicted_s)

    def _decode(self, desk: Desk, requests: list[Request]) -> None:
        """A token each; when memory runs out, whoever bears it best gives way."""
        for request in requests:
            if desk.preempted and not request.holds_kv:
                continue  # it gave way to an earlier one
            while not desk.grow(request, 1):
                victim = max(desk.running, key=lambda other: self._slack(desk, other))
                self._evict(desk, victim)
                if victim is request:
                    break
            else:
                if request.planned % CHARGED == 0 and self._line.shared(request.kind.name):
                    self._line.charge(request, CHARGED)

    def _open(self, desk: Desk, promised: list[Request]) -> Envelope:
        """The step with its decodes in, and how long it may get."""
        step = Envelope(desk)
        timeline = self.pace == "timeline"
        if desk.preempted:
            promised = [request for request in promised if request.holds_kv]
        rows, context = len(promised), 0
        due_s: dict[float, float] = {}  # the earliest deadline of all who were promised this gap
        for request in promised:
            context += request.planned
            gap = request.itl_s
            if gap is None or timeline or request.e2e_s is not None or request.first_token_s is None:
                gap, due = gap_s(request), next_token_s(request, timeline=timeline)
            else:
                due = request.shown_s + gap
            if gap not in due_s or due < due_s[gap]:
                due_s[gap] = due
        for request in {request.kind.name: request for request in promised}.values():
            step.percentile = max(step.percentile, self._held_to(request))
        step.hold(rows, context)
        if step.cost is None:
            return step
        alone_s = step.takes_s(step.shape) if rows else 0.0
        if self.pace == "even":
            # What a step leaves of the time, the next one has. So streams live on a reserve, out of which a step that
            # takes longer than expected is paid; in the long run steps still take what their readers take a token.
            step.share = SPENT
        newcomer_s = self.step_share * desk.tightest_ttft_s
        step.limit_s = newcomer_s if alone_s < newcomer_s else self.stretch * alone_s
        kept = [gap for gap in due_s if gap >= alone_s]
        crowded = False
        if kept:
            left_s = min(due_s[gap] for gap in kept) - desk.now
            longest_s = min(step.limit_s, LONGEST * min(kept))
            step.limit_s = min(step.limit_s, left_s)
            if self.pace == "even" and left_s > 0.0:
                step.longest_s = longest_s
                step.share = min(step.share, longest_s / left_s)
                step.spared_s = left_s - SPARED * min(kept)
        elif due_s and max(due_s) < step.takes_s(StepShape(1, 1, context // rows, 0)):  # not even for one alone
            step.limit_s = min(step.limit_s, self.stretch * alone_s)
        elif due_s:  # too many at once: until some have ended, nobody joins and prompts all but stand still
            step.limit_s, crowded = 0.0, True
        step.gather(rows, context, min(kept, default=inf), crowded=crowded)
        return step

    def _serve_in_time(self, desk: Desk, step: Envelope, urgent: list[Request], most: int) -> int:
        """Prompts whose first token can still come in time, the most urgent first; the tokens they got."""
        under_way: dict[str, int] = {}  # by tenant
        for begun in urgent:
            under_way[begun.spec.tenant] = under_way.get(begun.spec.tenant, 0) + 1
        given, may_begin, step.full = 0, not self._aside.kept_out, False
        while given < most and not step.full:
            first = self._first(desk, urgent)
            head = self._newcomer(desk, first, urgent) if may_begin else None
            if (request := head or first) is None:
                break
            if head is None:
                urgent.remove(request)
                if not request.holds_kv:
                    continue  # it gave way a moment ago
            # With many under way, newcomers begin only what they also end in this step: each holds memory.
            whole = head is not None and under_way.get(request.spec.tenant, 0) >= self.partial
            size = self._give(desk, step, request, most - given, whole=whole)
            given += size
            if not size and head is not None:
                may_begin = False  # nobody overtakes the head
            elif size and step.cost is not None and not step.full and request.first_token_s is None:
                # Its first token comes at the end of this step, which must not be too late for it, if it is not yet.
                left_s = request.deadline_s - desk.now
                step.first_s = min(step.first_s, left_s if left_s > 0.0 else inf)
                step.limit_s = min(step.limit_s, step.first_s)
        return given

    def _is_urgent(self, desk: Desk, request: Request) -> bool:
        """Whether a prompt under way is of use in time: for its first token, or for an answer it was evicted from."""
        if request.first_token_s is not None:
            return gap_s(request) < inf
        if request.deadline_s == inf:
            return False
        return self._backlog.makes_it(desk, request) or self._line.behind(request)  # whose tenant has its share yet

    def _first(self, desk: Desk, urgent: list[Request]) -> Request | None:
        """Who goes on first of the prompts under way: whoever was evicted in an answer, then as in the line."""
        answering = [request for request in urgent if request.first_token_s is not None]
        if answering:
            return min(answering, key=lambda request: request.deadline_s)
        return self._line.first_of(urgent, desk.now) if urgent else None

    def _newcomer(self, desk: Desk, first: Request | None, urgent: list[Request]) -> Request | None:
        """Who begins next, if he goes before the `first` of the prompts under way.

        Who could not make it behind those of its tenant that go first does not begin: it would only hold memory.
        """

        def makes_it(request: Request) -> bool:
            ahead = sum(
                other.known - other.planned
                for other in urgent
                if other.deadline_s <= request.deadline_s and other.spec.tenant == request.spec.tenant
            )
            return self._backlog.makes_it(desk, request, ahead)

        head = self._line.resumed()
        if head is not None or (first is not None and first.first_token_s is not None):
            return head
        head = self._line.punctual(makes_it)
        owed = self._line.owed()
        if owed is not None and (head is None or self._line.before(owed, head, desk.now)):
            head = owed
        return None if head is None or (first is not None and not self._line.before(head, first, desk.now)) else head

    def _serve_aside(self, desk: Desk, step: Envelope, most: int) -> None:
        """Those who are late or were promised nothing, as far as `most` tokens go."""
        given, step.full = 0, False
        while given < most and not step.full:
            request = self._aside.next(step.has_room)
            if request is None:
                break
            begins = not request.holds_kv
            size = self._give(desk, step, request, most - given, left=True)
            if size:
                given += size
                self._aside.gave(request, size, began=begins)
            elif begins:
                self._aside.keep_out(request)
                break  # nobody overtakes the head

    def _give(
        self,
        desk: Desk,
        step: Envelope,
        request: Request,
        most: int,
        *,
        whole: bool = False,
        left: bool = False,
    ) -> int:
        """Give a prompt what fits, letting it in if it waits; how many tokens that is.

        With `whole`, all it needs or nothing. With `left`, out of its class's share of what is left; without, at the
        cost of classes of lower priority if need be.
        """
        running = request.holds_kv
        if running and request in desk.rows:
            return 0
        start = request.planned if running else request.known - desk.uncached(request)
        todo = request.known - start
        wanted = min(todo, most, desk.budget)
        if step.cost is None and desk.rows:
            wanted = min(wanted, self.untested_budget - step.prefilled)
        sparing = self._line.ahead(request)
        size = step.most(start, wanted, sparing=sparing)
        # Whoever is behind goes at once: what is saved for larger parts is of use to all, and paid by him.
        saving = self._starving < SAVING and (sparing or not self._line.behind(request))
        if saving and size < wanted and not step.prefilled and step.saves_for(size, start, wanted):
            desk.bound_by, step.full = Bound.DEADLINE, True
            return 0
        if size < self.floor and not step.prefilled:
            least = min(self.floor, wanted)
            # Caution makes steps smaller, it does not stop prompts whose time is expected to suffice: a model that
            # was surprised a few times would otherwise never see another prompt, and stay as wrong as it is.
            if self._starving >= self.patience or not desk.rows or step.expects(start, least, sparing=sparing):
                size = max(size, least)
        if size < todo:
            desk.bound_by = Bound.DEADLINE if size < wanted else Bound.BUDGET
            if whole:
                return 0
            step.full = True
        if size <= 0:
            return 0
        if running:
            if not desk.grow(request, size):
                desk.bound_by = Bound.MEMORY
                return 0
        elif not self._let_in(desk, step, request, size, left=left):
            return 0
        step.add(start, size)
        self._line.charge(request, size, left=left)
        return size

    def _let_in(self, desk: Desk, step: Envelope, request: Request, size: int, *, left: bool) -> bool:
        """Admit one who waits, if there is a pace, a seat and memory for him."""
        if not step.has_room(request):
            desk.bound_by = Bound.DEADLINE
            return False
        if not self._room.find(desk, step.under_way, request, left=left):
            desk.bound_by = Bound.MEMORY
            return False
        if not desk.admit(request, size):
            return False
        self._line.leave(request)
        step.join(request)
        return True

    def _decode_others(self, desk: Desk, step: Envelope, others: list[Request]) -> None:
        """A token for those who were promised none at any time, as far as they fit; who has waited longest first."""
        others = [request for request in others if request.holds_kv]
        if not others:
            return
        fit = step.rows([request.planned + 1 for request in others])
        if fit < len(others):
            desk.bound_by = Bound.DEADLINE
            others.sort(key=lambda request: request.last_token_s)
            fit = step.rows([request.planned + 1 for request in others])
        self._silent = 0 if fit else self._silent + 1
        if self._silent >= self.patience or not desk.rows:
            fit, self._silent = max(fit, min(self.floor, len(others))), 0
        before = len(desk.rows)
        self._decode(desk, others[:fit])
        served = desk.rows[before:]
        step.hold(len(served), sum(request.planned for request in served))

    def _unlock(self, desk: Desk, step: Envelope) -> None:
        """Prompts under way that hold each other's memory: the oldest takes it from the others."""
        holding = [request for request in step.under_way if request.holds_kv]
        if not holding:
            return
        first, *others = sorted(holding, key=lambda request: request.arrived_s)
        while not self._give(desk, step, first, desk.budget) and others:
            self._evict(desk, others.pop())

    def _evict(self, desk: Desk, victim: Request) -> None:
        desk.preempt(victim)
        self._aside.leave(victim)
        due_s = next_token_s(victim, timeline=self.pace == "timeline")
        if victim.first_token_s is not None and due_s < inf:
            self._line.resume(victim, due_s)
        else:
            self._line.add(victim)

    def _slack(self, desk: Desk, request: Request) -> tuple[float, float]:
        return slack_per_token(request, desk.now, timeline=self.pace == "timeline")
