"""The time axis of a run: requests in flight against brute force, bins that lose nothing, costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.measure.cost import cost_of
from paceline.measure.metrics import measure
from paceline.measure.records import RequestRecord
from paceline.measure.slo import parse_slos
from paceline.measure.summary import measure_run
from paceline.measure.timeline import Span, bins, in_flight, mean_in_flight, token_arrivals, whole_span
from tests.measure.making import failed, records_of, run_of, streamed

spans = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=25)


def record(start: float, length: float, name: str) -> RequestRecord:
    return streamed([length * 1e3], at_s=start, id=name)


@given(spans, st.integers(0, 60), st.integers(1, 90))
def test_in_flight_is_the_brute_force_count(lives: list[tuple[int, int]], start: int, length: int) -> None:
    records = [record(float(a), float(b), str(i)) for i, (a, b) in enumerate(lives)]
    steps = in_flight(records)
    assert steps[-1][1] == 0
    assert all(level >= 0 for _, level in steps)
    counted = [sum(a <= second < a + b for a, b in lives) for second in range(start, start + length)]
    found = mean_in_flight(steps, Span(float(start), float(start + length)))
    assert found == pytest.approx(sum(counted) / length, abs=1e-6)


@given(spans)
def test_littles_law_holds_over_the_whole_run(lives: list[tuple[int, int]]) -> None:
    records = [record(float(a), float(b), str(i)) for i, (a, b) in enumerate(lives)]
    span = whole_span(records)
    assert span is not None
    level = mean_in_flight(in_flight(records), span)
    assert level == pytest.approx(sum(b for _, b in lives) / span.seconds)


@given(st.integers(1, 200), st.integers(1, 40))
def test_bins_lose_no_request_and_no_token(n: int, wanted: int) -> None:
    run = run_of([100.0 + (i * 37) % 90 if i % 9 else math.inf for i in range(n)])
    span = whole_span([request.record for request in run.requests])
    assert span is not None
    rows = bins(run.requests, span, wanted)
    assert sum(row.scheduled for row in rows) == n
    assert sum(row.failed for row in rows) == run.failed
    assert sum(row.finished for row in rows) == run.succeeded
    assert sum(row.tokens for row in rows) == pytest.approx(5 * run.succeeded)
    assert len(rows) <= 2.5 * wanted + 1


def test_token_arrivals_sum_to_the_tokens() -> None:
    for made in (
        streamed([100, 120, 150], n=3),
        streamed([100, 120, 150], n=12),
        streamed([100, 120, 150, 180], n=3),  # more events than tokens
        streamed([100, 100, 100], n=3),
        streamed([300], kinds="B", n=40, stream=False),
    ):
        request = measure(made)
        assert sum(k for _, k in token_arrivals(request)) == pytest.approx(request.output_tokens)
    assert token_arrivals(measure(failed())) == []
    assert token_arrivals(measure(streamed([100, 120]))) == []


def test_cost() -> None:
    """36 a hour is a cent a second; a run of ten seconds costs ten cents, whatever failed meanwhile."""
    records = [*records_of([1000.0] * 91, every_s=0.1, tokens=1), failed(at_s=1.0)]
    run = measure_run(records, slos=parse_slos("ttft<=2s"))
    found = cost_of(run, 36.0)
    assert found is not None
    assert found.total == pytest.approx(0.1)
    assert found.per_request == pytest.approx(0.1 / 91)
    assert found.per_good_request == pytest.approx(0.1 / 91)
    assert found.per_million_output == pytest.approx(1e6 * 0.1 / 91)
    assert found.per_million_total == pytest.approx(1e6 * 0.1 / (91 * 101))


def test_cost_of_nothing_is_unknown() -> None:
    assert cost_of(measure_run([]), 1.0) is None
    lost = cost_of(measure_run([failed()]), 1.0)
    assert lost is not None
    assert (lost.per_request, lost.per_million_output) == (None, None)
    unknown = cost_of(measure_run([streamed([100, 120])]), 1.0)
    assert unknown is not None
    assert unknown.per_million_output is None
    for price in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="price"):
            cost_of(run_of([100.0]), price)
