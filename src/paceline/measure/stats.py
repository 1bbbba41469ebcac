"""Statistics that a latency number needs before anybody may rely on it.

    Quantile      a percentile with n, its order-statistic interval and its "thin" and "gateable" marks
    Trend         is the run stationary? Spearman's rank correlation of ten batch means against time
    block_bootstrap   an interval for any statistic of requests that waited for one another
    effective_n   how many independent requests n correlated ones are worth

Percentiles of several runs or workers are never averaged here: pool the samples first. A value that is missing is
left out by the caller and counted; a failed request may enter as +inf, and everything below handles it.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from paceline.measure.distributions import binomial_cdf, student_t_cdf, student_t_quantile

Method = Literal["linear", "nearest-rank"]
METHOD: Method = "linear"  # numpy's and most tools' default; named in every report
PERCENTILES: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
CONFIDENCE = 0.95
BLOCK_S = 5.0  # requests this near in time share a queue and are resampled together


def percentile(values: Sequence[float], q: float, method: Method = METHOD) -> float | None:
    """The `q`-th percentile (0..100) of `values` (any order, +inf allowed); None for no values.

    `linear` interpolates between the two nearest order statistics at position (n - 1) q / 100; `nearest-rank` is the
    smallest value with at least q % of the values at or below it.
    """
    return percentile_of_sorted(sorted(values), q, method)


def percentile_of_sorted(ordered: Sequence[float], q: float, method: Method = METHOD) -> float | None:
    """`percentile` for values that are in ascending order already."""
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"percentile {q} is outside 0..100")
    if not ordered:
        return None
    if method == "nearest-rank":
        # Rounding keeps 99 % of 100 at rank 99: 0.99 * 100 is a hair above 99 in binary floating point.
        rank = math.ceil(round(q * len(ordered) / 100.0, 9))
        return ordered[max(rank, 1) - 1]
    position = q * (len(ordered) - 1) / 100.0
    below = math.floor(position)
    fraction = position - below
    if fraction < 1e-12 or below + 1 >= len(ordered):
        return ordered[below]
    low, high = ordered[below], ordered[below + 1]
    # inf - inf is NaN; between anything and +inf there is only +inf.
    return math.inf if math.isinf(high) else low + (high - low) * fraction


@lru_cache(maxsize=4096)
def rank_interval(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int | None, int | None]:
    """1-based ranks (l, u) such that [x_(l), x_(u)] holds the true percentile with `confidence`, distribution-free.

    None where n is too small for a bound on that side: a p99 of 299 requests has no upper bound.
    """
    p, alpha = q / 100.0, (1.0 - confidence) / 2.0
    # low: the largest l with P(B <= l - 1) <= alpha;  high: the smallest u with P(B >= u) <= alpha.
    low = _last_true(lambda rank: binomial_cdf(rank - 1, n, p) <= alpha, n)
    high = _last_true(lambda rank: 1.0 - binomial_cdf(rank - 1, n, p) > alpha, n) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def _last_true(falling: Callable[[int], bool], n: int) -> int:
    """Largest rank in 1..n for which a predicate that is true, then false, holds; 0 for none."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        if falling(middle):
            low = middle
        else:
            high = middle - 1
    return low


def smallest_n(q: float, confidence: float = CONFIDENCE) -> int:
    """The fewest requests that can prove "q % are under the bound" when all are: p99 299, p95 59, p90 29."""
    return math.ceil(math.log(1.0 - confidence) / math.log(q / 100.0)) if q < 100.0 else 1


def is_thin(n: int, q: float) -> bool:
    """Fewer than ten values beyond the percentile: it may be printed, but marked."""
    return n * (100.0 - q) < 1000.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Quantile:
    """One percentile with what a reader needs to weigh it. `low` or `high` None: n is too small for that bound."""

    q: float
    value: float | None
    low: float | None
    high: float | None
    n: int
    thin: bool
    gateable: bool  # n reaches `smallest_n`; below it no gate on this percentile can pass

    @property
    def label(self) -> str:
        return f"p{self.q:g}"


def quantile(ordered: Sequence[float], q: float, method: Method = METHOD, confidence: float = CONFIDENCE) -> Quantile:
    """The percentile of ascending values with its order-statistic interval."""
    n = len(ordered)
    low, high = rank_interval(n, q, confidence) if n else (None, None)
    return Quantile(
        q=q,
        value=percentile_of_sorted(ordered, q, method),
        low=None if low is None else ordered[low - 1],
        high=None if high is None else ordered[high - 1],
        n=n,
        thin=is_thin(n, q),
        gateable=n >= smallest_n(q, confidence),
    )


def pooled_quantile(ordered: Sequence[float], q: float, independent: int, method: Method = METHOD) -> Quantile:
    """The percentile of pooled values (all token gaps, say) of which only `independent` groups are independent.

    The interval is that of `independent` values: its ranks, as shares, are looked up among the pooled ones.
    """
    low, high = rank_interval(independent, q) if independent else (None, None)

    def at(rank: int | None) -> float | None:
        return None if rank is None else percentile_of_sorted(ordered, 100.0 * rank / (independent + 1))

    return Quantile(
        q=q,
        value=percentile_of_sorted(ordered, q, method),
        low=at(low),
        high=at(high),
        n=len(ordered),
        thin=is_thin(independent, q),
        gateable=independent >= smallest_n(q),
    )


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean (exactly rounded sum); None for no values."""
    return math.fsum(values) / len(values) if values else None


def standard_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None below two values."""
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's t interval of the mean of *independent* values (runs, batches: not single requests); None below 2."""
    spread, centre = standard_deviation(values), mean(values)
    if spread is None or centre is None:
        return None
    half = student_t_quantile(0.5 + confidence / 2.0, len(values) - 1) * spread / math.sqrt(len(values))
    return centre - half, centre + half


def autocorrelation(values: Sequence[float]) -> float:
    """Lag-1 autocorrelation of values in time order, in [-1, 1]; 0 where it is undefined (constant, or under 3)."""
    n = len(values)
    if n < 3:
        return 0.0
    centre = math.fsum(values) / n
    variance = math.fsum((value - centre) ** 2 for value in values)
    if variance == 0.0:
        return 0.0
    return math.fsum((a - centre) * (b - centre) for a, b in itertools.pairwise(values)) / variance


def effective_n(values: Sequence[float]) -> float:
    """n (1 - rho) / (1 + rho), never above n: negative correlation is not credited."""
    rho = max(0.0, autocorrelation(values))
    return len(values) * (1.0 - rho) / (1.0 + rho)


@dataclass(frozen=True, slots=True)
class Trend:
    """Spearman's rho of batch means against time.

    `drifting`: |rho| > 0.65 and p < 0.05, and the last three batches differ from the first three by more than 5 %.
    Without that last condition one steady run in twenty-five would be called drifting.
    """

    rho: float
    p_value: float
    change: float  # mean of the last three batches over that of the first three, minus 1
    batches: int
    drifting: bool


def trend(values: Sequence[float], batches: int = 10) -> Trend | None:
    """Trend of finite values in time order; None when there are fewer than two values for each batch."""
    if len(values) < 2 * batches:
        return None
    edges = [round(i * len(values) / batches) for i in range(batches + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    rho = spearman(range(batches), means)
    if abs(rho) >= 1.0 - 1e-12:
        p_value = 0.0
    else:
        t = rho * math.sqrt((batches - 2) / (1.0 - rho * rho))
        p_value = 2.0 * (1.0 - student_t_cdf(abs(t), batches - 2))
    before, after = math.fsum(means[:3]), math.fsum(means[-3:])
    change = after / before - 1.0 if before > 0.0 else (math.inf if after > 0.0 else 0.0)
    return Trend(rho, p_value, change, batches, abs(rho) > 0.65 and p_value < 0.05 and abs(change) > 0.05)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation, ties given their mean rank; 0 when either side is constant."""
    a, b = _ranks(xs), _ranks(ys)
    centre = (len(a) + 1) / 2.0
    spread = math.sqrt(math.fsum((x - centre) ** 2 for x in a) * math.fsum((y - centre) ** 2 for y in b))
    return 0.0 if spread == 0.0 else math.fsum((x - centre) * (y - centre) for x, y in zip(a, b, strict=True)) / spread


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + 1 + end) / 2.0
        start = end
    return ranks


def time_blocks(times: Sequence[float], block_s: float = BLOCK_S) -> list[list[int]]:
    """Indices grouped by `block_s` seconds of `times` (any order), in time order; empty blocks are left out."""
    blocks: dict[int, list[int]] = {}
    for index, when in enumerate(times):
        blocks.setdefault(math.floor(when / block_s), []).append(index)
    return [blocks[key] for key in sorted(blocks)]


Statistic = Callable[[Sequence[float]], float | None]


def block_bootstrap(
    values: Sequence[float],
    times: Sequence[float],
    statistic: Statistic,
    *,
    block_s: float = BLOCK_S,
    draws: int = 1000,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> tuple[float, float] | None:
    """Percentile interval of `statistic` under resampling of whole time blocks; None below six blocks.

    Single requests are never resampled: they share queues and batches, and an interval that takes them for
    independent is too narrow.
    """
    blocks = [[values[index] for index in block] for block in time_blocks(times, block_s)]
    if len(blocks) < 6:
        return None
    rng = random.Random(seed)  # noqa: S311 - resampling, not a secret
    results: list[float] = []
    for _ in range(draws):
        drawn = [value for block in rng.choices(blocks, k=len(blocks)) for value in block]
        result = statistic(drawn)
        if result is not None:
            results.append(result)
    results.sort()
    return _central(results, confidence)


def _central(ordered: Sequence[float], confidence: float) -> tuple[float, float] | None:
    low = percentile_of_sorted(ordered, 50.0 * (1.0 - confidence))
    high = percentile_of_sorted(ordered, 50.0 * (1.0 + confidence))
    return None if low is None or high is None else (low, high)


def dispersion(times: Sequence[float], bin_s: float = 1.0) -> float | None:
    """Variance over mean of the counts per `bin_s` seconds: 1 for a Poisson process, 0 for a constant rate."""
    if not times:
        return None
    first, last = min(times), max(times)
    bins = math.floor((last - first) / bin_s)  # the last, partial bin is left out
    if bins < 2:
        return None
    ordered = sorted(times)
    edges = [bisect_left(ordered, first + i * bin_s) for i in range(bins + 1)]
    counts = [float(b - a) for a, b in itertools.pairwise(edges)]
    spread = standard_deviation(counts)
    centre = math.fsum(counts) / bins
    return None if spread is None else spread * spread / centre
