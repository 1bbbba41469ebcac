"""random: any of them, each as likely. The floor that a router must beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.policies.parts.knobs import knob
from paceline.route.policies.base import Ask, Load, Router


@dataclass
class RandomPick(Router):
    """Uniform."""

    seed: int = knob(0)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(self.seed)  # noqa: S311  reproducible, no secrets

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """One draw a request."""
        return loads[self._rng.randrange(len(loads))].name
