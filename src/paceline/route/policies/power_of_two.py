"""power_of_two: two drawn at random, the less loaded of them.

Nearly as even as asking everybody (Mitzenmacher, "The power of two choices in randomized load balancing", 2001), and
when loads are known late, many requests that come at once do not all run to the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.policies.parts.knobs import knob
from paceline.route.policies.base import Ask, Load, Router
from paceline.route.policies.least_load import lighter


@dataclass
class PowerOfTwo(Router):
    """Two distinct ones, by outstanding tokens."""

    seed: int = knob(0)
    decode_weight: float = knob(0.01, least=0.0)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(self.seed)  # noqa: S311  reproducible, no secrets

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """The lighter of two; the only one when there is one."""
        drawn = loads if len(loads) < 2 else self._rng.sample(loads, 2)
        return lighter(drawn, self.decode_weight)
