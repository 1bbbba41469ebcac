"""Outages: when which replica dies, and for how long. Planned by the user, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.errors import ConfigError

ON_LOSS = ("fail", "retry", "resume")


@dataclass(frozen=True, slots=True)
class Outage:
    """`replica` dies at `at_s` and begins its cold start `down_s` later; inf: it never comes back."""

    at_s: float
    replica: str
    down_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Retry:
    """What becomes of a request whose engine died.

    `fail`: its client gets an error. `retry`: it starts over elsewhere, its tokens void. `resume`: elsewhere again,
    with the tokens it has as part of the prompt, and the stream goes on where it stopped.
    """

    on_loss: str = "retry"
    most: int = 3  # losses of one request, before it fails
    wait_s: float = 0.0  # until whoever routes has noticed

    def __post_init__(self) -> None:
        if self.on_loss not in ON_LOSS:
            raise ConfigError(f"on_loss is {self.on_loss!r}; it must be one of {', '.join(ON_LOSS)}")
        if self.most < 0 or self.wait_s < 0.0:
            raise ConfigError(f"retries are at most {self.most} after {self.wait_s} s; both must be 0 or more")


def drawn_outages(names: Sequence[str], *, mtbf_s: float, down_s: float, until_s: float, seed: int) -> list[Outage]:
    """Independent failures: exponential times between them with mean `mtbf_s`, each `down_s` long.

    One generator a replica: adding a replica moves nobody else's failures.
    """
    if mtbf_s <= 0.0 or until_s == inf:
        raise ConfigError(f"mtbf is {mtbf_s} s until {until_s} s; it must be above 0 and the end must be known")
    outages = []
    for name in names:
        rng = random.Random(f"{seed}:outage:{name}")  # noqa: S311  reproducible, no secrets
        at_s = rng.expovariate(1.0 / mtbf_s)
        while at_s < until_s:
            outages.append(Outage(at_s, name, down_s))
            at_s += down_s + rng.expovariate(1.0 / mtbf_s)
    return sorted(outages, key=lambda outage: (outage.at_s, outage.replica))
