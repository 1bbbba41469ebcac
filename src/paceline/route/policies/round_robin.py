"""round_robin: each in turn. Needs to know nothing; even in number of requests, uneven in work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.route.policies.base import Ask, Load, Router


@dataclass
class RoundRobin(Router):
    """Turns are counted over names, so that one replica's absence does not move everybody else's turn."""

    _turns: dict[str, int] = field(init=False, default_factory=dict)  # requests each name has had

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """Who has had fewest turns among those present; a newcomer starts level with them, not with all of history."""
        known = [self._turns[load.name] for load in loads if load.name in self._turns]
        for load in loads:
            self._turns.setdefault(load.name, min(known, default=0))
        name = min((load.name for load in loads), key=self._turns.__getitem__)
        self._turns[name] += 1
        return name

    def left(self, name: str) -> None:
        """It starts level with the others when it comes again."""
        self._turns.pop(name, None)
