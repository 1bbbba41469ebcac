"""Those aside: who is late already or was promised nothing, whose turn it is among them, and what they are owed.

Of a class, two kinds of prompts want what is left:

    stragglers   had begun while they could still make it, and could not: each holds memory, and little is left to do
    the line     whoever begins aside, in the line's order; a few at a time, since each holds memory until it is done

They have their turns by the tokens they were given: while both want some, each gets half. So stragglers, who come anew
for as long as an overload lasts, never keep the head of the line from beginning.

They are owed a share of what goes to prompts in time. Once a head of the line could have been computed whole from what
is owed, and only lacks a place, nobody else begins until it has found one.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.policies.parts.line import Line
from paceline.core.request import Request

MOST_CREDIT = 4096.0  # tokens that those aside may be owed at most


class Aside:
    """Turns among those aside. `open` it in every step before anything else is asked."""

    def __init__(self, line: Line, partial: int) -> None:
        self.credit = 0.0  # prefill tokens they are owed
        self.kept_out = False  # whether nobody else may begin in this step
        self._line = line
        self._partial = partial  # prompts of a class that may be under way from the line at once
        self._begun: set[str] = set()  # ids of those under way that began here
        self._lead: dict[str, float] = {}  # by class: tokens that stragglers had more than the line
        self._stragglers: dict[str, list[Request]] = {}
        self._from_line: dict[str, list[Request]] = {}
        self._places: dict[str, int] = {}  # by class: how many more may begin

    def open(self, under_way: list[Request]) -> None:
        """A step begins; of these prompts, the last ones of a class go on first."""
        self.kept_out = False
        self._stragglers, self._from_line, self._places = {}, {}, {}
        for request in under_way:
            side = self._from_line if request.request_id in self._begun else self._stragglers
            side.setdefault(request.kind.name, []).append(request)
        for name, requests in self._from_line.items():
            self._places[name] = self._partial - len(requests)

    def next(self, has_room: Callable[[Request], bool]) -> Request | None:
        """Whose turn it is: classes by their share. A class whose head has no room among those who decode may begin
        nobody; another may."""
        for name in self._line.by_share():
            stragglers, ours = _going_on(self._stragglers, name), _going_on(self._from_line, name)
            mine = ours[-1] if ours else self._line.aside(name) if self._places.get(name, self._partial) > 0 else None
            if mine is not None and not ours and not has_room(mine):
                self.keep_out(mine)
                self._places[name], mine = 0, None
            if stragglers and (mine is None or self._lead.get(name, 0.0) <= 0.0):
                return stragglers.pop()
            if mine is not None:
                if ours:
                    ours.pop()
                if not stragglers:
                    self._lead[name] = 0.0  # who stayed away has saved up nothing
                return mine
        return None

    def gave(self, request: Request, tokens: int, *, began: bool) -> None:
        """It was its turn, and it got so many; whether it began with them."""
        name, id_ = request.kind.name, request.request_id
        if began:
            self._begun.add(id_)
            self._places[name] = self._places.get(name, self._partial) - 1
        self._lead[name] = self._lead.get(name, 0.0) + (-tokens if id_ in self._begun else tokens)
        self.credit -= tokens

    def keep_out(self, head: Request) -> None:
        """It was its turn, and it found no place. If all that it needs is owed, nobody else may take one."""
        self.kept_out = self.kept_out or self.credit >= min(head.known, MOST_CREDIT)

    def owe(self, tokens: float) -> None:
        """They are owed so many more; nothing is saved up for nobody."""
        wanted = self._stragglers or self._from_line or self._line.any_aside()
        self.credit = max(0.0, min(self.credit + tokens, MOST_CREDIT)) if wanted else 0.0

    def leave(self, request: Request) -> None:
        """It has ended, or gave way."""
        self._begun.discard(request.request_id)


def _going_on(side: dict[str, list[Request]], name: str) -> list[Request]:
    """Those of a class who did not give way a moment ago."""
    requests = side.get(name, [])
    while requests and not requests[-1].holds_kv:
        requests.pop()
    return requests
