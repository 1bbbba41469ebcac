"""The line of those who wait under a promise: by deadline, tenants fairly, and the late ones after the punctual.

Within a class, tenants take turns by a virtual counter of the tokens they have had (VTC, OSDI 2024): the one that had
least is next, so a flood delays the flooder. A tenant that was away does not save up: it starts at the level of those
who are here. Among classes, the earliest deadline goes first. Whoever can no longer make it steps aside, so that one
lost promise does not cost the next; late requests go by priority of class, then age.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from paceline.core.request import Request, RequestState

Entry = tuple[float, int, Request]  # deadline, order of arrival, request


@dataclass
class _Tenant:
    served: float = 0.0  # virtual tokens
    heap: list[Entry] = field(default_factory=list)


class Line:
    """Order among the waiting requests; who has left the queue is dropped when met."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[str, _Tenant]] = {}
        self._late: list[tuple[int, float, int, Request]] = []  # priority, arrival, order, request
        self._counter = 0

    def add(self, request: Request, deadline_s: float) -> None:
        """A request starts to wait (again)."""
        tenants = self._classes.setdefault(request.kind.name, {})
        tenant = tenants.setdefault(request.spec.tenant, _Tenant())
        _trim(tenant.heap)
        if not tenant.heap:
            here = [other.served for other in tenants.values() if other is not tenant and other.heap]
            tenant.served = max(tenant.served, min(here, default=0.0))
        self._counter += 1
        heappush(tenant.heap, (deadline_s, self._counter, request))

    def charge(self, request: Request, tokens: int) -> None:
        """Count tokens given to a request against its tenant."""
        self._classes[request.kind.name][request.spec.tenant].served += tokens

    def shared(self, kind: str) -> bool:
        """Whether more than one tenant uses the class, so that charging makes a difference."""
        return len(self._classes.get(kind, ())) > 1

    def before(self, one: Request, other: Request) -> bool:
        """Whether `one` goes before `other`: tenants of a class by what they had, all others by deadline."""
        if one.kind is other.kind and one.spec.tenant != other.spec.tenant:
            tenants = self._classes[one.kind.name]
            return tenants[one.spec.tenant].served < tenants[other.spec.tenant].served
        return one.deadline_s < other.deadline_s

    def punctual(self, makes_it: Callable[[Request], bool]) -> Request | None:
        """Who is next among those whose first token can still come in time."""
        best: Entry | None = None
        for tenants in self._classes.values():
            while (entry := _next_of(tenants)) is not None:
                if makes_it(entry[2]):
                    best = entry if best is None else min(best, entry)
                    break
                self._step_aside(tenants, entry)
        return None if best is None else best[2]

    def late(self) -> Request | None:
        """Who is next among those who cannot make it any more."""
        while self._late and self._late[0][3].state is not RequestState.WAITING:
            heappop(self._late)
        return self._late[0][3] if self._late else None

    def _step_aside(self, tenants: dict[str, _Tenant], entry: Entry) -> None:
        _, order, request = entry
        heappop(tenants[request.spec.tenant].heap)
        heappush(self._late, (request.kind.priority, request.arrived_s, order, request))


def _trim(heap: list[Entry]) -> None:
    while heap and heap[0][2].state is not RequestState.WAITING:
        heappop(heap)


def _next_of(tenants: dict[str, _Tenant]) -> Entry | None:
    best: _Tenant | None = None
    for tenant in tenants.values():
        _trim(tenant.heap)
        if tenant.heap and (best is None or tenant.served < best.served):
            best = tenant
    return None if best is None else best.heap[0]
