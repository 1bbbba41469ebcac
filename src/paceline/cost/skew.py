"""Which experts a batch touches when tokens do not choose evenly.

The popularity of the i-th expert is taken to go as i ** -skew: 0 is even, as balancing losses aim at; measured routers
lie between 0.2 and 1.2 (AIConfigurator measures its kernels at "power_law_1.01" and "power_law_1.2").
"""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=256)
def popularity(count: int, active: int, skew: float) -> tuple[float, ...]:
    """Chance that a token chooses each expert; they sum to `active` and none is above 1."""
    raw = [rank**-skew for rank in range(1, count + 1)]
    capped = [0.0] * count
    left, first = float(active), 0
    while first < count:  # the most popular are always chosen: share the rest out below them
        scale = left / sum(raw[first:])
        if raw[first] * scale <= 1.0:
            capped[first:] = [value * scale for value in raw[first:]]
            break
        capped[first] = 1.0
        left -= 1.0
        first += 1
    return tuple(capped)


def touched(tokens: int, count: int, active: int, skew: float = 0.0) -> float:
    """Expected number of experts that at least one of `tokens` chooses."""
    if skew == 0.0:
        return count * (1.0 - (1.0 - active / count) ** tokens)
    return sum(1.0 - (1.0 - chance) ** tokens for chance in popularity(count, active, skew))


@lru_cache(maxsize=1024)
def even_equivalent(count: int, active: int, skew: float) -> int:
    """How many evenly chosen experts are as crowded: two tokens meet in one equally often (inverse sum of squares)."""
    if skew == 0.0:
        return count
    chances = popularity(count, active, skew)
    return max(active, round(active * active / sum(chance * chance for chance in chances)))


@lru_cache(maxsize=1 << 16)
def hottest_share(tokens: int, count: int, active: int, ep: int, skew: float) -> float:
    """Load of the busiest of `ep` groups of experts over the mean load.

    Experts are dealt out in order of popularity, so a group's mean load follows from the skew; on top of it, of n
    random choices in g groups the fullest has about n / g + sqrt(2 * n / g * log g) (Raab and Steger 1998).
    """
    if ep == 1 or tokens == 0:
        return 1.0
    chances = popularity(count, active, skew)
    loads = [sum(chances[group::ep]) for group in range(ep)]
    mean = active / ep
    choices = tokens * max(loads)
    spread = math.sqrt(2.0 * choices * math.log(ep))
    # A token chooses an expert once: no group can get more than all tokens on each of its experts.
    most = min(choices + spread, float(tokens * min(active, count // ep)))
    return max(1.0, most / (tokens * mean))
