"""Who asks what and when: the arrivals of a plan, of a trace or of a recorded log, as requests for an engine.

    traffic = planned(plan)                  # a BenchPlan: synthetic, Azure, Mooncake, ShareGPT or our own trace
    traffic = recorded("calls.jsonl")        # what a real engine was asked (recorded.py)
    while (at_s := traffic.next_s) < math.inf:
        arrival = traffic.pop()              # Arrival(at_s, spec, answer, ...)
        ...
        traffic.ended(arrival, at_s, ok=True)   # may bring the next turn, or the next request of a closed loop

Prompts are token ids made up so that two prompts begin alike exactly as far as the trace says: the real prefix cache
works on them. Without blocks or a shared prefix, prompts have nothing in common.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from paceline.core.classes import DEFAULT_CLASS
from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.errors import ConfigError
from paceline.measure.plan import Arrivals, BenchPlan, Load
from paceline.measure.schedule import CHARS_PER_TOKEN, build_schedule, seeded
from paceline.measure.schedule import Arrival as Planned
from paceline.simulate.backend import FIRST_PROMPT, OUTPUT, STOP

MOST_PROMPT = 1 << 24  # tokens; as numbers of Python's they take memory here


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Times in seconds from the start of the schedule."""

    at_s: float  # scheduled: the zero of its latencies
    spec: RequestSpec  # its `sent_s` is when it was sent
    output_tokens: int  # of its whole answer
    answer: tuple[int, ...] | None = None  # for `Replica.deliver`; None: it ends by max_tokens
    planned: Planned | None = None  # what it was made from
    turn: int = 0
    first_wave: bool = False  # of a closed loop
    index: int = 0

    @property
    def sent_s(self) -> float:
        """When it left the client; later than `at_s` only below a cap of requests in flight."""
        return self.at_s if self.spec.sent_s is None else self.spec.sent_s


class Traffic(Protocol):
    """A source of requests. `next_s` never moves back before the time of the last `pop` or `ended`."""

    @property
    def next_s(self) -> float:
        """When the next request is due; inf while none is."""
        ...

    @property
    def total(self) -> int | None:
        """Requests in all; None where nobody can tell beforehand."""
        ...

    def pop(self) -> Arrival:
        """The request that is due at `next_s`."""
        ...

    def ended(self, arrival: Arrival, at_s: float, *, ok: bool) -> None:
        """A request has ended, for its client."""
        ...


class ListTraffic:
    """Arrivals that were there before, in order of time: a recorded log."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.sent_s))
        self.total: int | None = len(self._arrivals)

    @property
    def next_s(self) -> float:
        return self._arrivals[0].sent_s if self._arrivals else math.inf

    def pop(self) -> Arrival:
        return self._arrivals.popleft()

    def ended(self, arrival: Arrival, at_s: float, *, ok: bool) -> None:
        """Nothing follows."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A request that is not made yet: its prompt costs memory."""

    at_s: float
    planned: Planned
    turn: int = 0
    history: tuple[int, ...] = ()
    first_wave: bool = False


class PlannedTraffic:
    """The schedule of a plan: open or closed loop, with or without conversations and a cap.

    `max_tokens` is what clients ask for where that is more than what they get. `class_shares` gives arrivals that name
    no class one of these, drawn by weight.
    """

    def __init__(
        self,
        schedule: Sequence[Planned],
        load: Load,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        class_shares: Mapping[str, float] | None = None,
        default_class: str = DEFAULT_CLASS,
    ) -> None:
        longest = max(schedule, key=lambda one: max(wanted or 0 for wanted in one.inputs), default=None)
        if longest is not None and max(wanted or 0 for wanted in longest.inputs) > MOST_PROMPT:
            raise ConfigError(
                f"request {longest.index} has a prompt of more than {MOST_PROMPT:,} tokens, which no engine takes"
            )
        self._schedule, self._load = schedule, load
        self._make = SpecMaker(seed, max_tokens=max_tokens, class_shares=class_shares, default_class=default_class)
        self._next = 0  # of the schedule
        self._followers: list[tuple[float, int, _Due]] = []  # a heap: turns to come, slots that ask
        self._counter = itertools.count()
        self._cap = math.inf if load.max_concurrency is None else load.max_concurrency
        self._in_flight = 0
        self._released_s = -math.inf  # when the last one ended: who was due before, below the cap, goes then
        self._closed = load.arrivals is Arrivals.CLOSED
        if self._closed:
            assert load.concurrency is not None
            for slot in range(load.concurrency):
                self._ask(load.stagger_s * slot / load.concurrency, first_wave=True)
        open_ended = self._closed and load.requests is None and load.duration_s is not None
        self.total: int | None = None if open_ended else sum(planned.turns for planned in schedule)

    @property
    def next_s(self) -> float:
        """When the next request leaves the client."""
        if self._in_flight >= self._cap:
            return math.inf
        due_s = min(self._scheduled_s, self._followers[0][0] if self._followers else math.inf)
        return max(due_s, self._released_s) if self._cap < math.inf else due_s

    def pop(self) -> Arrival:
        """The next request; below a cap it may have been due earlier than it is sent."""
        sent_s = self.next_s
        if self._followers and self._followers[0][0] < self._scheduled_s:
            due = heappop(self._followers)[2]
        else:
            due = _Due(self._scheduled_s, self._schedule[self._next])
            self._next += 1
        self._in_flight += 1
        return self._make(due, sent_s)

    def ended(self, arrival: Arrival, at_s: float, *, ok: bool) -> None:
        """What follows: the next turn, or the slot's next request."""
        self._in_flight -= 1
        self._released_s = at_s
        planned, turn = arrival.planned, arrival.turn + 1
        assert planned is not None
        if ok and turn < planned.turns:
            history = arrival.spec.prompt + (OUTPUT,) * arrival.output_tokens
            self._later(_Due(at_s + planned.thinks_s[turn - 1], planned, turn, history))
        elif self._closed:
            self._ask(at_s)

    @property
    def _scheduled_s(self) -> float:
        """When the next arrival of an open loop is due."""
        if self._closed or self._next >= len(self._schedule):
            return math.inf
        return self._schedule[self._next].at_s or 0.0

    def _later(self, due: _Due) -> None:
        heappush(self._followers, (due.at_s, next(self._counter), due))

    def _ask(self, now_s: float, *, first_wave: bool = False) -> None:
        """A slot of a closed loop asks for its next request, unless the run is over."""
        load = self._load
        bounded = load.requests is not None or load.duration_s is None
        if (load.duration_s is not None and now_s >= load.duration_s) or (
            bounded and self._next >= len(self._schedule)
        ):
            return
        round_, place = divmod(self._next, len(self._schedule))
        planned = self._schedule[place]
        if round_:  # bounded by time and faster than foreseen: the lengths again, under other ids
            planned = msgspec.structs.replace(planned, index=planned.index + round_ * len(self._schedule))
        self._next += 1
        self._later(_Due(now_s, planned, first_wave=first_wave))


class SpecMaker:
    """Makes the request of an arrival of the schedule: prompt, length, class."""

    def __init__(
        self,
        seed: int,
        *,
        max_tokens: int | None,
        class_shares: Mapping[str, float] | None,
        default_class: str,
    ) -> None:
        self._seed = seed
        self._max_tokens = max_tokens
        self._default_class = default_class
        self._names = tuple(class_shares or ())
        self._shares = tuple((class_shares or {}).values())
        if self._shares and not (min(self._shares) >= 0.0 and 0.0 < sum(self._shares) < math.inf):
            raise ConfigError(f"class shares are {dict(class_shares or {})}; they must be from 0 up, finite, not all 0")
        self._prompts = PromptMaker()

    def __call__(self, due: _Due, sent_s: float) -> Arrival:
        planned, turn = due.planned, due.turn
        prompt = due.history + self._prompts.tokens(planned, turn)
        output = planned.outputs[turn]
        asked = output if self._max_tokens is None else max(output, self._max_tokens)
        spec = RequestSpec(
            request_id=f"r{planned.index}" if planned.turns == 1 else f"r{planned.index}.{turn}",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=asked, stop_token_ids=(STOP,)),
            traffic_class=planned.traffic_class or self._class_of(planned.index),
            sent_s=sent_s,
            tenant=planned.tenant,
        )
        answer = None if asked == output else (OUTPUT,) * (output - 1) + (STOP,)
        return Arrival(due.at_s, spec, output, answer, planned, turn, due.first_wave, planned.index)

    def _class_of(self, index: int) -> str:
        if not self._names:
            return self._default_class
        # A generator of its own index: the classes of the others do not move when one is left out.
        return seeded(f"{self._seed}:class:{index}").choices(self._names, self._shares)[0]


class PromptMaker:
    """Token ids of prompts: own text, the plan's shared prefixes and a trace's blocks, each from ids of its own."""

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}

    def tokens(self, planned: Planned, turn: int) -> tuple[int, ...]:
        """The new tokens of one turn. Text is counted as four characters a token, since no tokenizer is at hand."""
        wanted = planned.inputs[turn]
        if wanted is None:
            text = planned.texts[turn] if planned.texts else planned.messages
            wanted = max(1, round(len(text) / CHARS_PER_TOKEN))
        if not turn:
            wanted = max(1, wanted)  # an engine begins with something, if only with its first special token
        own = self._id((planned.index, turn))
        if turn or not (planned.blocks or planned.prefix):
            return (own,) * wanted
        shared: list[int] = []
        if planned.blocks:
            for block in planned.blocks:
                shared += (self._id(("block", block)),) * planned.block_tokens
        else:
            shared += (self._id(("prefix", planned.prefix)),) * planned.prefix_tokens
        return (*shared[:wanted], *(own,) * max(0, wanted - len(shared)))

    def _id(self, name: object) -> int:
        return self._ids.setdefault(name, FIRST_PROMPT + len(self._ids))


def planned(
    plan: BenchPlan,
    *,
    max_tokens: int | None = None,
    class_shares: Mapping[str, float] | None = None,
    default_class: str = DEFAULT_CLASS,
) -> PlannedTraffic:
    """The traffic of a plan. Raises ConfigError for a plan or a trace that cannot be used (with the line)."""
    return PlannedTraffic(
        build_schedule(plan),
        plan.load,
        seed=plan.seed,
        max_tokens=max_tokens,
        class_shares=class_shares,
        default_class=default_class,
    )
