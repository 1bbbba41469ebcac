"""Statistics of pairs: two arms measured side by side, again and again.

Each pair gives one log ratio, which drift, heat and the time of day touch far less than either run. The interval is
that of the median, by order statistics: no distribution is assumed, and below six pairs there is none, because no
sign test of five pairs reaches p < 0.05.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.measure.stats import percentile_of_sorted, rank_interval

EXACT_PAIRS = 16  # up to here all 2^n sign patterns are looked at


class Change(StrEnum):
    """What B is, compared with A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """Median of B / A over pairs. `low`, `high` None: too few pairs for a 95 % interval."""

    n: int
    median: float | None
    low: float | None
    high: float | None
    p_value: float | None  # two-sided sign-flip test of "no difference"
    noise: float | None  # the A/A floor as a ratio above 1: 1.02 means identical runs differ by up to 2 %
    verdict: Change
    why: str


def sign_flip_test(differences: Sequence[float], draws: int = 20_000, seed: int = 0) -> float | None:
    """Two-sided p-value of the mean of paired differences, under random signs; None for no pairs."""
    if not differences:
        return None
    observed = abs(math.fsum(differences)) * (1.0 - 1e-12)
    if len(differences) <= EXACT_PAIRS:
        patterns = itertools.product((1.0, -1.0), repeat=len(differences) - 1)  # by symmetry one sign is fixed
        hits = total = 0
        for signs in patterns:
            hits += (
                abs(differences[0] + math.fsum(s * d for s, d in zip(signs, differences[1:], strict=True))) >= observed
            )
            total += 1
        return hits / total
    rng = random.Random(seed)  # noqa: S311 - resampling, not a secret
    hits = sum(abs(math.fsum(d if rng.random() < 0.5 else -d for d in differences)) >= observed for _ in range(draws))
    return (hits + 1) / (draws + 1)


def noise_floor(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Largest ratio (>= 1) between two runs of the *same* arm; None without such pairs."""
    logs = [abs(math.log(b / a)) for a, b in pairs if _usable(a, b)]
    return math.exp(max(logs)) if logs else None


def _usable(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and 0.0 < a < math.inf and 0.0 < b < math.inf


def compare_pairs(
    pairs: Sequence[tuple[float, float]],
    same_arm: Sequence[tuple[float, float]] = (),
    *,
    smallest_effect: float = 0.03,
    higher_is_faster: bool = False,
) -> RatioEstimate:
    """Verdict on (A, B) pairs of one statistic, against the noise seen between runs of the same arm.

    faster / slower: the interval excludes 1 and the median is beyond both the smallest effect and the noise floor.
    same: both bounds lie within the smallest effect. Everything else is undecided.
    """
    usable = [(a, b) for a, b in pairs if _usable(a, b)]
    logs = sorted(math.log(b / a) for a, b in usable)
    n = len(logs)
    noise = noise_floor(same_arm)
    if n < len(pairs) or not n:
        why = f"{len(pairs) - n} of {len(pairs)} pairs have no finite value on one side" if pairs else "no pairs"
        return RatioEstimate(n, None, None, None, None, noise, Change.UNDECIDED, why)
    middle = percentile_of_sorted(logs, 50.0)
    assert middle is not None
    low_rank, high_rank = rank_interval(n, 50.0)
    p_value = sign_flip_test([math.log(b / a) for a, b in usable])
    if low_rank is None or high_rank is None:
        why = f"{n} pairs give no 95 % interval; six are the fewest that can"
        return RatioEstimate(n, math.exp(middle), None, None, p_value, noise, Change.UNDECIDED, why)
    low, high = logs[low_rank - 1], logs[high_rank - 1]
    verdict, why = decide(low, middle, high, noise, smallest_effect, higher_is_faster)
    return RatioEstimate(n, math.exp(middle), math.exp(low), math.exp(high), p_value, noise, verdict, why)


def decide(
    low: float, middle: float, high: float, noise: float | None, smallest_effect: float, higher_is_faster: bool
) -> tuple[Change, str]:
    """Verdict from a log ratio and its interval; `noise` is the A/A floor as a ratio."""
    effect = math.log1p(smallest_effect)
    if -effect <= low and high <= effect:
        return Change.SAME, f"the whole interval lies within ±{100 * smallest_effect:g} %"
    if low <= 0.0 <= high:
        return Change.UNDECIDED, "the interval holds both directions; more pairs may tell"
    if abs(middle) < effect:
        return Change.UNDECIDED, f"there is a difference, not shown to be beyond ±{100 * smallest_effect:g} %"
    if noise is None:
        return Change.UNDECIDED, "without A/A runs the noise floor is unknown"
    if abs(middle) <= math.log(noise):
        return Change.UNDECIDED, f"two runs of the same arm differ by up to {100 * (noise - 1):.1f} %, as much as this"
    faster = (middle > 0.0) is higher_is_faster
    return (Change.FASTER if faster else Change.SLOWER), "the interval, the smallest effect and the noise floor agree"
