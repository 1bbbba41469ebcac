"""KV kept outside the GPU: in the host's memory, on a disk, on another machine. Reload it, or compute it again?

Prompts are written to every tier as they are computed (the write is off the critical path and costs nothing here).
When a request comes, the tiers are asked in order, fastest first, for what the GPU does not hold. A stretch is reloaded
where that is faster than prefilling it,

    queue on the tier's link + latency + tokens * KV bytes / bandwidth  <  predicted prefill of the same tokens

and the request enters its engine when the last stretch has come; meanwhile the engine serves others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.protocols import CostModel
from paceline.core.shape import StepShape
from paceline.errors import ConfigError
from paceline.route.policies.base import Ask
from paceline.route.policies.holdings import Holdings
from paceline.simulate.fleet.link import Link, LinkSpec


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One place for KV."""

    name: str
    capacity_tokens: int  # KV positions it holds; of the whole fleet where it is shared
    link: LinkSpec  # towards the GPU
    shared: bool = False  # one for all members, or one each
    always: bool = False  # reload whatever it holds, even where computing would be faster

    def __post_init__(self) -> None:
        if self.capacity_tokens < 0:
            raise ConfigError(f"tier {self.name}: capacity_tokens is {self.capacity_tokens}; it must be 0 or more")
        if self.link.bytes_per_s <= 0.0:
            raise ConfigError(f"tier {self.name}: {self.link.bytes_per_s} bytes/s; it must be above 0")


class Tier:
    """A tier's contents, its link, and what it was good for."""

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.link = Link(spec.link)
        self.asked_tokens = 0  # prompt tokens that faster places did not have
        self.held_tokens = 0  # of those, what it had
        self.reloaded_tokens = 0  # of those, what was reloaded and not computed
        self._holdings: Holdings | None = None

    def write(self, ask: Ask) -> None:
        """A prompt was computed: its full blocks are kept, as far as they fit."""
        self._of(ask).add(ask.blocks)

    def match(self, ask: Ask) -> int:
        """Leading tokens of the prompt that it holds."""
        return min(self._of(ask).match(ask.blocks) * ask.block_tokens, ask.prompt_tokens - 1)

    def _of(self, ask: Ask) -> Holdings:
        if self._holdings is None:
            self._holdings = Holdings(self.spec.capacity_tokens // ask.block_tokens)
        return self._holdings


def reload(
    tiers: Sequence[Tier], ask: Ask, held: int, now_s: float, *, kv_bytes_per_token: float, cost: CostModel
) -> tuple[int, float]:
    """Fetch what pays: (leading tokens that will be held, when they all are). `held` of them the GPU has already."""
    depth, ready_s = held, now_s
    for tier in tiers:
        tier.asked_tokens += ask.prompt_tokens - depth
        reach = tier.match(ask)
        if reach <= depth:
            continue
        tier.held_tokens += reach - depth
        nbytes = (reach - depth) * kv_bytes_per_token
        compute_s = cost.predict(StepShape().plus(depth, reach - depth)).seconds
        if not tier.spec.always and tier.link.done_s(now_s, nbytes) - now_s >= compute_s:
            break  # a slower tier cannot continue a chain that has a hole
        ready_s = max(ready_s, tier.link.enter(now_s, nbytes))
        tier.reloaded_tokens += reach - depth
        depth = reach
    return depth, ready_s
