"""What every router is, and the two values it decides on.

A router is told what somebody standing in front of the engines can know: what it sent where, and what has come back.
It never looks into an engine: in a simulation the step that is in flight has already been computed, and a router that
saw its end would know the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.policies.parts.knobs import check_knobs


@dataclass(frozen=True, slots=True)
class Ask:
    """What a router may know of a request: never its output length, which nobody knows yet."""

    request_id: str
    prompt_tokens: int
    # Names of the prompt's full blocks, first to last. Equal names mean equal whole prefixes, as a hash chain makes
    # them (`core.prefix`) and as the Mooncake traces number them.
    blocks: tuple[int | bytes, ...] = ()
    block_tokens: int = 512  # tokens of one such block
    session: str = ""  # who talks; "" is nobody in particular


@dataclass(frozen=True, slots=True)
class Load:
    """What is known to be under way at one replica."""

    name: str
    waiting: int = 0  # requests without a first token
    waiting_tokens: int = 0  # their prompt tokens, less those its cache was expected to hold
    running: int = 0  # requests between their first and their last token
    running_tokens: int = 0  # KV positions those hold: prompts and what has been generated
    cache_tokens: int = 0  # KV positions that fit its memory; 0 is unknown
    speed: float = 1.0  # relative to the others; a chip twice as fast has twice the speed

    @property
    def requests(self) -> int:
        return self.waiting + self.running


class Router:
    """Picks a replica for each request as it comes. Subclasses are dataclasses; their public fields are their knobs.

    A router must be deterministic: the same calls give the same picks. It may keep state; randomness comes from a
    `seed` among its knobs.
    """

    def __post_init__(self) -> None:
        """Refuse knobs that cannot be honoured (`ConfigError`)."""
        check_knobs(self)

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """The name of one of `loads`, which are those that can take requests now, in a fixed order; never empty."""
        raise NotImplementedError

    def hit_tokens(self, ask: Ask, name: str) -> int:
        """Prompt tokens this router believes `name` holds in its cache. The default believes nothing."""
        return 0

    def sent(self, ask: Ask, load: Load) -> None:
        """The request has been sent to the replica of this load, as a rule the one picked. After `hit_tokens`: a prompt
        on its way is not a prompt that was there."""

    def left(self, name: str) -> None:
        """A replica is gone, and whatever it held. One of the same name may come again, empty."""


def least(loads: Sequence[Load], cost: Sequence[float]) -> str:
    """The name with the lowest cost; of equal ones the first."""
    return loads[min(range(len(loads)), key=cost.__getitem__)].name
