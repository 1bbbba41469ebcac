"""The line of those who wait under a promise: by deadline, tenants fairly, and the late ones after the punctual.

Three queues, served in this order by the policy that owns the line:

    resumed   who was preempted in the middle of an answer that is promised: before any newcomer
    punctual  whose first token can still come in time: the earliest deadline first
    aside     who can no longer make it, or was promised no time at all: classes share by weight what is left for them

Whoever can no longer make it steps aside, so that one lost promise does not cost the next. Inside a class, in both of
the last two, tenants take turns by a virtual counter of the tokens they have had (VTC, OSDI 2024): the one that had
least is next, so a flood delays the flooder. A tenant that was away has saved up no more than a few prompts: those go
first, and after them it takes turns with those who are served now. That is for who sends little: it is spent by what a
tenant gets, and by what it asks for while more of its own wait, so a flood that begins has no right of way. Classes
share what is left by the same counter, divided by their weights.

A tenant is `ahead` while another that was here lately has had much less than it, and `behind` while another has had
much more: a flood is ahead, and whoever it would push aside is behind. Of equals neither is either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from paceline.core.request import Request

CREDIT = 2048.0  # tokens that a tenant may have had less than those served now: what a quiet one sends goes first
MUCH = CREDIT / 2  # more or less: a few prompts, which tenants that take turns do not come apart by

Entry = tuple[float, int, Request]  # what it is ordered by, place in line, request
Live = Callable[[Entry], bool]


class _Side:
    """One heap of requests a tenant; the tenant with the lowest counter is next. Counters only rise."""

    def __init__(self) -> None:
        self.heaps: dict[str, list[Entry]] = {}
        self._turns: list[tuple[float, int, str]] = []  # a tenant's counter when last looked at

    def push(self, entry: Entry, served: float) -> None:
        tenant = entry[2].spec.tenant
        if tenant not in self.heaps:
            self.heaps[tenant] = []
            heappush(self._turns, (served, entry[1], tenant))
        heappush(self.heaps[tenant], entry)

    def head(self, served: dict[str, float], live: Live) -> Entry | None:
        """Who is next; those who have left the line are dropped when met."""
        while self._turns:
            known, order, tenant = self._turns[0]
            heap = self.heaps[tenant]
            while heap and not live(heap[0]):
                heappop(heap)
            if not heap:
                heappop(self._turns)
                del self.heaps[tenant]
            elif served[tenant] > known:
                heapreplace(self._turns, (served[tenant], order, tenant))
            else:
                return heap[0]
        return None

    def sweep(self, live: Live) -> None:
        for heap in self.heaps.values():
            heap[:] = filter(live, heap)
            heapify(heap)


@dataclass
class _Class:
    """One class of traffic in line."""

    served: dict[str, float] = field(default_factory=dict)  # virtual tokens of each tenant
    saved: dict[str, float] = field(default_factory=dict)  # of these, what one that came back has yet to spend
    level: float = 0.0  # counter of the tenant served last: where newcomers start
    left: float = 0.0  # tokens that its requests aside had, by weight
    punctual: _Side = field(default_factory=_Side)
    aside: _Side = field(default_factory=_Side)

    def spend(self, tenant: str, tokens: float, *, asked: bool = False) -> None:
        """It got so many tokens, or `asked` for them while others of its own wait: less is left of what it saved up."""
        saved = self.saved.get(tenant)
        if saved is None:
            return
        if asked:
            self.served[tenant] += max(0.0, min(saved, tokens))
        if saved > tokens:
            self.saved[tenant] = saved - tokens
        else:
            del self.saved[tenant]


class Line:
    """Order among the waiting requests."""

    def __init__(self) -> None:
        self._classes: dict[str, _Class] = {}
        self._here: dict[tuple[str, str], set[str]] = {}  # ids of live requests by class and tenant
        self._resumed: list[tuple[int, float, int, Request]] = []  # priority, deadline, place, request
        self._places: dict[str, int] = {}  # of those in line, by request id; any other entry is void
        self._counter = 0
        self._entries = 0  # pushed since the last sweep
        self._left_level = 0.0

    def add(self, request: Request) -> None:
        """A newcomer, by the deadline of its first token; or one that was preempted and keeps its age."""
        place = self._place(request)
        kind = self._classes.setdefault(request.kind.name, _Class())
        tenant = request.spec.tenant
        self._here.setdefault((request.kind.name, tenant), set()).add(request.request_id)
        if tenant not in kind.punctual.heaps and tenant not in kind.aside.heaps:
            kind.served[tenant] = max(kind.served.get(tenant, 0.0), kind.level - CREDIT)
            kind.saved.pop(tenant, None)  # of an earlier visit
            if kind.served[tenant] < kind.level:
                kind.saved[tenant] = kind.level - kind.served[tenant]
        else:
            kind.spend(tenant, len(request.spec.prompt), asked=True)
        entry = (request.deadline_s, place, request)
        if request.deadline_s < inf:
            kind.punctual.push(entry, kind.served[tenant])
        else:
            self._put_aside(kind, entry)

    def resume(self, request: Request, due_s: float) -> None:
        """One that was preempted in a promised answer, by the deadline of its next token."""
        place = self._place(request)
        heappush(self._resumed, (request.kind.priority, due_s, place, request))

    def leave(self, request: Request) -> None:
        """It runs now."""
        self._places.pop(request.request_id, None)

    def end(self, request: Request) -> None:
        """It has ended."""
        self.leave(request)
        whose = request.kind.name, request.spec.tenant
        self._here[whose].discard(request.request_id)
        if not self._here[whose]:
            del self._here[whose]

    def charge(self, request: Request, tokens: int, *, left: bool = False) -> None:
        """Count tokens given to a request against its tenant; with `left`, against its class's share of the rest."""
        kind = self._classes[request.kind.name]
        tenant = request.spec.tenant
        had = kind.served.get(tenant, kind.level - CREDIT)
        kind.served[tenant] = had + tokens
        kind.spend(tenant, tokens)
        if left:
            self._left_level = max(self._left_level, kind.left)
            kind.left += tokens / request.kind.weight

    def shared(self, kind: str) -> bool:
        """Whether more than one tenant uses the class, so that charging makes a difference."""
        return len(self._classes[kind].served) > 1

    def ahead(self, request: Request) -> bool:
        """Whether its tenant has had much more than another of the class."""
        served = self._classes[request.kind.name].served
        return len(served) > 1 and served.get(request.spec.tenant, 0.0) - min(served.values()) > MUCH

    def behind(self, request: Request) -> bool:
        """Whether its tenant has had much less than another of the class that is here, but for what it had itself.

        Who had the right to begin has the right to end.
        """
        name, tenant = request.kind.name, request.spec.tenant
        served = self._classes[name].served
        if len(served) < 2:
            return False
        had = served.get(tenant, 0.0) - request.planned
        return any(more - had > MUCH and (name, other) in self._here for other, more in served.items())

    def owed(self) -> Request | None:
        """Who is next of those who stand aside although their tenant is behind, and were promised a first token."""
        for name, kind in self._classes.items():
            if len(kind.served) > 1:
                head = self.aside(name)
                if head is not None and head.deadline_s < inf and self.behind(head):
                    return head
        return None

    def before(self, one: Request, other: Request, now: float) -> bool:
        """Whether `one` goes before `other`: tenants of a class by what they had, all others by deadline."""
        if one.kind is other.kind and one.spec.tenant != other.spec.tenant:
            served = self._classes[one.kind.name].served
            return served.get(one.spec.tenant, 0.0) < served.get(other.spec.tenant, 0.0)
        return _due_s(one, now) < _due_s(other, now)

    def first_of(self, requests: list[Request], now: float) -> Request:
        """Who of these goes first: the earliest deadline names the class, and the tenant that had least is next."""
        head = min(requests, key=lambda request: _due_s(request, now))
        served = self._classes[head.kind.name].served
        if len(served) < 2:
            return head
        same = (request for request in requests if request.kind is head.kind)
        return min(same, key=lambda request: (served.get(request.spec.tenant, 0.0), _due_s(request, now)))

    def resumed(self) -> Request | None:
        """Who goes on first of those preempted in an answer."""
        while self._resumed and not self._live(self._resumed[0][1:]):
            heappop(self._resumed)
        return self._resumed[0][3] if self._resumed else None

    def punctual(self, makes_it: Callable[[Request], bool]) -> Request | None:
        """Who is next among those whose first token can still come in time."""
        best: Entry | None = None
        for kind in self._classes.values():
            while (entry := kind.punctual.head(kind.served, self._live)) is not None:
                if makes_it(entry[2]):
                    best = entry if best is None else min(best, entry)
                    break
                heappop(kind.punctual.heaps[entry[2].spec.tenant])
                self._put_aside(kind, entry)
        if best is not None:
            self._raise_level(best[2])
        return None if best is None else best[2]

    def by_share(self) -> list[str]:
        """The classes, whoever has had least of what is left for its weight first."""
        return sorted(self._classes, key=lambda name: self._classes[name].left)

    def aside(self, name: str) -> Request | None:
        """Who is next among the others of a class: the oldest of the tenant that had least."""
        kind = self._classes[name]
        entry = kind.aside.head(kind.served, self._live)
        if entry is None:
            return None
        self._raise_level(entry[2])
        return entry[2]

    def any_aside(self) -> bool:
        """Whether anybody waits there."""
        return any(kind.aside.head(kind.served, self._live) is not None for kind in self._classes.values())

    def _live(self, entry: Entry) -> bool:
        return self._places.get(entry[2].request_id) == entry[1]

    def _place(self, request: Request) -> int:
        self._counter += 1
        self._places[request.request_id] = self._counter
        self._entries += 1
        if self._entries > 2 * len(self._places) + 256:
            self._sweep()
        return self._counter

    def _put_aside(self, kind: _Class, entry: Entry) -> None:
        request = entry[2]
        if not kind.aside.heaps:
            kind.left = max(kind.left, self._left_level)
        age = -inf if request.preemptions else request.arrived_s  # who had begun goes on before others begin
        kind.aside.push((age, entry[1], request), kind.served[request.spec.tenant])

    def _raise_level(self, request: Request) -> None:
        kind = self._classes[request.kind.name]
        kind.level = max(kind.level, kind.served[request.spec.tenant])

    def _sweep(self) -> None:
        """Forget entries that are void, and tenants that are away and no further than a newcomer would start."""
        for kind in self._classes.values():
            for side in (kind.punctual, kind.aside):
                side.sweep(self._live)
            here = kind.punctual.heaps.keys() | kind.aside.heaps.keys()
            for tenant in [name for name, had in kind.served.items() if had <= kind.level and name not in here]:
                del kind.served[tenant]
                kind.saved.pop(tenant, None)
        self._resumed[:] = [entry for entry in self._resumed if self._live(entry[1:])]
        heapify(self._resumed)
        self._entries = len(self._places)


def _due_s(request: Request, now: float) -> float:
    """Its deadline; where that has passed, as if it had come now: a lost promise does not cost others theirs."""
    return request.deadline_s if request.deadline_s > now else now + request.deadline_s - request.arrived_s
