"""What goes on beside a step on the same machine, and what that takes from it.

On a processor the step's threads, the HTTP server and often the clients share the cores. Every token that is sent is
work for them while the next step is computed, and so is every request that comes; a step waits for its slowest thread,
so it takes about so much longer. A step alone is the business of `StepShape`; this is the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Beside:
    """What a server did while a step was computed."""

    sent: int = 0  # tokens on their way to clients: those that the step before brought, if it ended just before
    requests: int = 0  # that came
    prompt_tokens: int = 0  # of those


NOTHING = Beside()


@dataclass(frozen=True, slots=True)
class Toll:
    """Seconds that a step takes longer for each, and where nine in ten fits to such steps would find it."""

    sent_s: float = 0.0
    request_s: float = 0.0
    prompt_token_s: float = 0.0
    sent_range_s: tuple[float, float] = (0.0, 0.0)
    request_range_s: tuple[float, float] = (0.0, 0.0)
    prompt_token_range_s: tuple[float, float] = (0.0, 0.0)

    def seconds(self, beside: Beside) -> float:
        """Of one step."""
        return self.sent_s * beside.sent + self.request_s * beside.requests + self.prompt_token_s * beside.prompt_tokens

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Toll:
        """What `dataclasses.asdict` made of one. Raises ConfigError for anything else."""
        found: dict[str, Any] = {}
        for entry in fields(cls):
            value = row.get(entry.name, entry.default)
            ranged = isinstance(entry.default, tuple)
            numbers = list(value) if ranged and isinstance(value, (list, tuple)) else [value]
            if len(numbers) != (2 if ranged else 1) or not all(map(_is_seconds, numbers)):
                raise ConfigError(f"the cost model cannot be read: beside.{entry.name} is {value!r}")
            found[entry.name] = tuple(map(float, numbers)) if ranged else float(numbers[0])
        return cls(**found)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < math.inf
