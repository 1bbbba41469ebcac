"""Classes of traffic: what is promised to whom, and what happens when it cannot be kept for all."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum

from paceline.errors import ConfigError

# What a header of an answer and a label of a metric can hold as it stands.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Overload(Enum):
    """What a class does with a request whose promise cannot be kept."""

    RELEGATE = "relegate"  # serve it after those whose promise can
    REJECT = "reject"  # say no at once, with the time to come back


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One class. None as a target means that nothing is promised. Checked when made (`ConfigError`)."""

    name: str
    priority: int = 0  # lower may take seats and memory from higher, and goes first under a priority order
    ttft_s: float | None = None  # arrival to first token
    itl_s: float | None = None  # every gap between two tokens
    e2e_s: float | None = None  # arrival to last token
    percentile: float = 0.95  # share of the tokens and requests that must be in time
    weight: float = 1.0  # the class's share of what is left by promises that can be kept
    queue_limit: int | None = None  # most waiting requests of the class; None is no bound
    overload: Overload = Overload.RELEGATE

    def __post_init__(self) -> None:
        where = f"class {self.name!r}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{where}: a class is named by up to 64 letters, digits, dots, dashes and underscores")
        for field in ("ttft_s", "itl_s", "e2e_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{where}: {field} is {value}; it must be above 0, or None for no promise")
        for target_s, what in ((self.ttft_s, "to the first token"), (self.itl_s, "between tokens")):
            if self.e2e_s is not None and target_s is not None and self.e2e_s < target_s:
                raise ConfigError(
                    f"{where}: {1000 * self.e2e_s:g} ms to the last token is less than {1000 * target_s:g} ms {what}; "
                    f"no token comes after the last one"
                )
        if not 0.0 < self.percentile < 1.0:
            raise ConfigError(f"{where}: percentile is {self.percentile}; it must be between 0 and 1, like 0.95")
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"{where}: weight is {self.weight}; it must be above 0 and finite")
        if self.queue_limit is not None and self.queue_limit < 0:
            raise ConfigError(f"{where}: queue_limit is {self.queue_limit}; it must be 0 or more, or left out")

    @property
    def promises(self) -> bool:
        """Whether anything is promised at all; a class without promises soaks up what is left."""
        return any(value is not None for value in (self.ttft_s, self.itl_s, self.e2e_s))


INTERACTIVE = TrafficClass("interactive", priority=0, ttft_s=1.0, itl_s=0.1, weight=2.0)
STANDARD = TrafficClass("standard", priority=1, ttft_s=5.0, itl_s=0.25)
BATCH = TrafficClass("batch", priority=2, weight=0.5)
BUILT_IN = (INTERACTIVE, STANDARD, BATCH)
DEFAULT_CLASS = STANDARD.name
