"""Statistics against the reference's figures, against brute force, and against their own laws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.measure import distributions, stats
from paceline.measure.paired import Change, compare_pairs, sign_flip_test

values = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("n", "q", "rank", "linear"), [(10, 90.0, 9, 9.1), (20, 50.0, 10, 10.5), (100, 99.0, 99, 99.01)]
)
def test_percentiles_of_one_to_n(n: int, q: float, rank: int, linear: float) -> None:
    numbers = [float(i) for i in range(1, n + 1)]
    assert stats.percentile(numbers, q, "nearest-rank") == rank
    assert stats.percentile(numbers, q) == pytest.approx(linear, abs=1e-9)


@given(values, st.floats(0.0, 100.0))
def test_linear_percentile_is_numpys(numbers: list[float], q: float) -> None:
    assert stats.percentile(numbers, q) == pytest.approx(float(np.percentile(numbers, q)), rel=1e-9, abs=1e-9)


def test_percentile_without_values_is_none_and_infinity_never_becomes_nan() -> None:
    assert stats.percentile([], 50.0) is None
    assert stats.percentile([1.0, math.inf, math.inf], 75.0) == math.inf
    assert stats.percentile([1.0, math.inf], 10.0) == math.inf
    assert stats.percentile([1.0, 2.0, math.inf], 50.0) == 2.0
    with pytest.raises(ValueError, match="outside"):
        stats.percentile([1.0], 101.0)


@pytest.mark.parametrize(
    ("n", "low", "high"), [(100, 97, None), (299, 292, None), (500, 490, 500), (1000, 983, 997), (5000, 4936, 4964)]
)
def test_order_statistic_interval_of_p99(n: int, low: int, high: int | None) -> None:
    assert stats.rank_interval(n, 99.0) == (low, high)


@given(st.integers(1, 400), st.sampled_from([50.0, 90.0, 95.0, 99.0]))
@settings(max_examples=60)
def test_rank_interval_covers_and_is_tight(n: int, q: float) -> None:
    low, high = stats.rank_interval(n, q)
    p = q / 100.0
    if low is not None:
        assert distributions.binomial_cdf(low - 1, n, p) <= 0.025 < distributions.binomial_cdf(low, n, p)
    if high is not None:
        assert 1 - distributions.binomial_cdf(high - 1, n, p) <= 0.025
        assert 1 - distributions.binomial_cdf(high - 2, n, p) > 0.025


def test_smallest_n() -> None:
    assert [stats.smallest_n(q) for q in (90.0, 95.0, 99.0, 99.9)] == [29, 59, 299, 2995]
    assert [stats.smallest_n(q, 0.99) for q in (90.0, 95.0, 99.0, 99.9)] == [44, 90, 459, 4603]


def test_thin_below_ten_values_beyond_the_percentile() -> None:
    assert stats.is_thin(999, 99.0)
    assert not stats.is_thin(1000, 99.0)
    assert stats.is_thin(99, 90.0)
    assert not stats.is_thin(100, 90.0)


@given(st.integers(1, 120), st.floats(0.001, 0.999), st.data())
@settings(max_examples=80)
def test_binomial_cdf_is_the_sum(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(-1, n))
    exact = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert distributions.binomial_cdf(k, n, p) == pytest.approx(exact, abs=1e-10)


def test_student_t_table() -> None:
    assert distributions.student_t_quantile(0.975, 2) == pytest.approx(4.30265, abs=1e-5)
    assert distributions.student_t_quantile(0.975, 9) == pytest.approx(2.26216, abs=1e-5)
    assert distributions.student_t_quantile(0.025, 9) == pytest.approx(-2.26216, abs=1e-5)


@pytest.mark.parametrize(("n", "factor"), [(3, 2.48), (5, 1.24), (10, 0.72)])
def test_half_width_of_a_mean_over_runs(n: int, factor: float) -> None:
    """t CV / sqrt(n) of the reference, for values whose coefficient of variation is one."""
    raw = [float(i) for i in range(n)]
    centre, spread = stats.mean(raw), stats.standard_deviation(raw)
    assert centre is not None
    assert spread is not None
    interval = stats.mean_interval([(x - centre) / spread + 1.0 for x in raw])
    assert interval is not None
    assert (interval[1] - interval[0]) / 2 == pytest.approx(factor, abs=0.005)


def test_clopper_pearson() -> None:
    assert distributions.binomial_interval(0, 0) == (0.0, 1.0)
    low, high = distributions.binomial_interval(5, 100)
    assert (low, high) == pytest.approx((0.01643, 0.11283), abs=1e-5)


def test_effective_n_of_autocorrelated_values() -> None:
    rng = random.Random(1)
    series, x = [], 0.0
    for _ in range(20_000):
        x = 0.5 * x + rng.gauss(0, 1)
        series.append(x)
    assert stats.effective_n(series) == pytest.approx(20_000 / 3, rel=0.05)
    assert stats.effective_n([1.0, 2.0] * 50) == 100  # negative correlation is not credited
    assert stats.effective_n([3.0] * 10) == 10


def test_trend_flags_a_ramp_and_no_noise() -> None:
    rng = random.Random(2)
    rising = stats.trend([1.0 + i / 1000 + rng.random() for i in range(1000)])
    assert rising is not None
    assert rising.drifting
    assert rising.rho > 0.9
    flags = 0
    for _ in range(200):
        found = stats.trend([1.0 + 0.02 * rng.random() for _ in range(100)])
        assert found is not None
        flags += found.drifting
    assert flags == 0  # a significant drift of less than 5 % is nothing to warn of
    assert stats.trend([1.0] * 19) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=30))
def test_spearman_is_pearson_of_mean_ranks(points: list[tuple[int, int]]) -> None:
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    rho = stats.spearman(xs, ys)
    assert -1.0 - 1e-9 <= rho <= 1.0 + 1e-9
    assert stats.spearman(ys, xs) == pytest.approx(rho)
    assert stats.spearman([x * 3 + 1 for x in xs], ys) == pytest.approx(rho)


def test_block_bootstrap_is_wider_than_pretending_independence() -> None:
    """Values constant within a block: n requests are worth as many as there are blocks."""
    rng = random.Random(3)
    levels = [rng.gauss(10, 1) for _ in range(20)]
    data = [level for level in levels for _ in range(50)]
    times = [i * 0.1 for i in range(len(data))]
    blocked = stats.block_bootstrap(data, times, stats.mean, block_s=5.0, draws=400)
    single = stats.block_bootstrap(data, times, stats.mean, block_s=0.1, draws=400)
    assert blocked is not None
    assert single is not None
    assert blocked[1] - blocked[0] > 4 * (single[1] - single[0])
    assert stats.block_bootstrap([1.0] * 10, [0.1 * i for i in range(10)], stats.mean) is None


def test_dispersion_of_arrivals() -> None:
    rng = random.Random(4)
    t, poisson = 0.0, []
    for _ in range(20_000):
        t += rng.expovariate(50.0)
        poisson.append(t)
    assert stats.dispersion(poisson) == pytest.approx(1.0, abs=0.2)
    assert stats.dispersion([i / 50 for i in range(1000)]) == pytest.approx(0.0, abs=0.02)


def test_sign_flip_needs_six_pairs() -> None:
    assert sign_flip_test([0.1] * 5) == 0.0625
    assert sign_flip_test([0.1] * 6) == 0.03125
    assert sign_flip_test([]) is None
    assert sign_flip_test([0.1, -0.1, 0.1, -0.1]) == 1.0
    many = sign_flip_test([0.1, 0.2] * 12)
    assert many is not None
    assert many < 0.001


QUIET = [(1.0, 1.005), (1.0, 0.996)]


@pytest.mark.parametrize(
    ("ratios", "noise", "verdict"),
    [
        ([0.80, 0.82, 0.79, 0.81, 0.83, 0.80], QUIET, Change.FASTER),
        ([1.20, 1.22, 1.19, 1.21, 1.23, 1.20], QUIET, Change.SLOWER),
        ([1.01, 0.99, 1.00, 1.005, 0.995, 1.01], QUIET, Change.SAME),
        ([0.80, 1.22, 0.79, 1.21, 0.83, 1.20], QUIET, Change.UNDECIDED),
        ([0.80, 0.82, 0.79, 0.81, 0.83], QUIET, Change.UNDECIDED),  # five pairs
        ([0.95, 0.94, 0.96, 0.95, 0.94, 0.95], [(1.0, 1.08)], Change.UNDECIDED),  # below the A/A floor
        ([0.80, 0.82, 0.79, 0.81, 0.83, 0.80], [], Change.UNDECIDED),  # no A/A at all
        ([0.80, 0.82, math.inf, 0.81, 0.83, 0.80], QUIET, Change.UNDECIDED),
        ([], QUIET, Change.UNDECIDED),
    ],
)
def test_verdict_on_pairs(ratios: list[float], noise: list[tuple[float, float]], verdict: Change) -> None:
    found = compare_pairs([(2.0, 2.0 * ratio) for ratio in ratios], noise)
    assert found.verdict is verdict, found.why


def test_verdict_of_a_rate_goes_the_other_way() -> None:
    pairs = [(100.0, 100.0 * r) for r in (1.2, 1.22, 1.19, 1.21, 1.23, 1.2)]
    assert compare_pairs(pairs, QUIET, higher_is_faster=True).verdict is Change.FASTER
