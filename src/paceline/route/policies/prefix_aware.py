"""prefix_aware: to where the first token comes soonest, counting what each replica already holds of the prompt.

A hit saves its tokens of prefill; a queue costs its tokens of waiting. Both are in one unit, so no threshold decides
between cache and balance: the cost of a replica is the prefill it must do before this request's first token,

    uncached tokens of the prompt + waiting tokens + decode_weight * KV tokens of those who generate

each scaled by the replica's speed. `balance` below 1 trusts the cache more than the queue, above 1 the reverse.
What a replica holds is what was sent there and has not been pushed out since (`holdings.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.policies.parts.knobs import knob
from paceline.route.policies.base import Ask, Load, Router
from paceline.route.policies.holdings import Holdings
from paceline.route.policies.least_load import outstanding


@dataclass
class PrefixAware(Router):
    """Prefill still to do, less what the cache saves."""

    balance: float = knob(1.0, least=0.0)  # weight of the queue against the hit
    decode_weight: float = knob(0.01, least=0.0)
    _held: dict[str, Holdings] = field(init=False, default_factory=dict)

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """The least prefill before the first token; of equals, whose cache has most room, so that prefixes spread."""
        return min(loads, key=lambda load: self._cost(ask, load)).name

    def hit_tokens(self, ask: Ask, name: str) -> int:
        """Leading tokens of the prompt that `name` is believed to hold; never the last one, which is computed."""
        held = self._held.get(name)
        blocks = held.match(ask.blocks) if held else 0
        return min(blocks * ask.block_tokens, max(ask.prompt_tokens - 1, 0))

    def sent(self, ask: Ask, load: Load) -> None:
        """The replica will hold the prompt, and what it pushes out is gone."""
        held = self._held.get(load.name)
        if held is None:
            held = self._held[load.name] = Holdings()
        if load.cache_tokens:
            held.capacity = load.cache_tokens // ask.block_tokens
        held.add(ask.blocks)

    def left(self, name: str) -> None:
        """Its cache is gone with it."""
        self._held.pop(name, None)

    def _cost(self, ask: Ask, load: Load) -> tuple[float, int]:
        uncached = ask.prompt_tokens - self.hit_tokens(ask, load.name)
        work = uncached + self.balance * outstanding(load, self.decode_weight)
        return work / load.speed, len(self._held.get(load.name, ()))
