"""The three distributions that the statistics need, from the regularised incomplete beta function.

Standard library only: a client machine that measures should not have to install SciPy for three tail probabilities.
Accurate to about 1e-12 in the ranges used here (n up to a few million).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta I_x(a, b) for a, b > 0 and x in [0, 1] (Lentz's continued fraction)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # The fraction converges fast only left of the mean; right of it the mirror image does.
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, 1.0 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    # About sqrt(max(a, b)) terms are needed; the bound only guards against a loop without end.
    for m in range(1, 200_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return value


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(B <= k) for B ~ Binomial(n, p)."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    return incomplete_beta(n - k, k + 1, 1.0 - p)


def student_t_cdf(t: float, df: float) -> float:
    """P(T <= t) for Student's t with `df` degrees of freedom."""
    half_tail = 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
    return 1.0 - half_tail if t > 0 else half_tail


@lru_cache(maxsize=256)
def student_t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, for 0 < p < 1."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -student_t_quantile(1.0 - p, df)
    high = 1.0
    while student_t_cdf(high, df) < p:
        high *= 2.0
    return _bisect_up(lambda t: student_t_cdf(t, df) - p, 0.0, high)


def binomial_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a share of which `k` of `n` were seen; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    alpha = (1.0 - confidence) / 2.0
    low = 0.0 if k == 0 else _bisect_up(lambda p: 1.0 - binomial_cdf(k - 1, n, p) - alpha, 0.0, 1.0)
    high = 1.0 if k == n else _bisect_up(lambda p: alpha - binomial_cdf(k, n, p), 0.0, 1.0)
    return low, high


def _bisect_up(rising: Callable[[float], float], low: float, high: float) -> float:
    """Root of a rising function between `low` and `high`."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if rising(middle) < 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
