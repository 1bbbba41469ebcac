"""Attainment over a sliding window."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.classes import BATCH, TrafficClass
from paceline.serve.attainment import WINDOW_S, Attainment

CHAT = TrafficClass("chat", ttft_s=1.0, itl_s=0.1)


def test_it_tells_whether_a_promise_is_kept() -> None:
    found = Attainment([CHAT, BATCH])
    for turn in range(100):
        found.outcome("chat").note("ttft", 1.0, 2.0 if turn < 4 else 0.5, CHAT.ttft_s)
        found.outcome("chat").note("itl", 1.0, 0.05, CHAT.itl_s)
    row = found.report(2.0)["chat"]
    assert row["ttft"]["attained"] == 0.96
    assert row["kept"] is True
    assert abs(row["margin"] - 0.01) < 1e-9
    for _ in range(10):
        found.outcome("chat").note("itl", 2.0, 0.3, CHAT.itl_s)
    assert found.report(2.0)["chat"]["kept"] is False


def test_nothing_promised_or_nothing_seen_is_neither_kept_nor_broken() -> None:
    found = Attainment([CHAT, BATCH])
    found.outcome("batch").note("ttft", 1.0, 100.0, None)
    report = found.report(1.0)
    assert report["batch"]["kept"] is None
    assert report["batch"]["ttft"]["n"] == 1
    assert report["chat"]["kept"] is None
    assert report["chat"]["ttft"]["p95_s"] is None, "a missing value is not 0"


def test_what_is_older_than_the_window_is_forgotten() -> None:
    found = Attainment([CHAT])
    found.outcome("chat").note("ttft", 0.0, 9.0, 1.0)
    assert found.report(WINDOW_S / 2)["chat"]["kept"] is False
    assert found.report(WINDOW_S + 20.0)["chat"]["kept"] is None


@pytest.mark.parametrize(
    ("ttft_s", "late", "e2e_s", "kept"),
    [
        (1.0, 0, 9.0, True),
        (1.1, 0, 9.0, False),
        (0.5, 1, 9.0, True),  # 19 of 20 gaps are 95 %
        (0.5, 2, 9.0, False),
        (0.5, 0, 11.0, False),
    ],
)
def test_a_request_is_good_inside_all_it_was_promised(ttft_s: float, late: int, e2e_s: float, kept: bool) -> None:
    outcome = Attainment([CHAT]).outcome("chat")
    outcome.note("ttft", 0.0, ttft_s, 1.0)
    for gap in range(20):
        outcome.note("itl", 0.0, 0.2 if gap < late else 0.1, 0.1)
    outcome.note("e2e", 0.0, e2e_s, 10.0)
    assert outcome.kept is kept


def test_a_request_that_was_promised_nothing_is_good_once_answered() -> None:
    outcome = Attainment([BATCH]).outcome("batch")
    outcome.note("ttft", 0.0, 100.0, None)
    outcome.note("itl", 0.0, 100.0, None)
    assert outcome.kept


@given(st.lists(st.floats(1e-4, 500.0), min_size=1, max_size=200), st.sampled_from([50, 95, 99]))
def test_a_percentile_is_never_better_than_the_truth_and_at_most_a_cell_worse(
    samples: list[float], percentile: int
) -> None:
    found = Attainment([CHAT])
    for sample in samples:
        found.outcome("chat").note("itl", 0.0, sample, 0.1)
    rank = -(-len(samples) * percentile // 100)
    truth = sorted(samples)[rank - 1]
    shown = found.report(0.0)["chat"]["itl"][f"p{percentile}_s"]
    assert truth <= shown * (1 + 1e-9)
    assert shown <= truth * 1.05 * (1 + 1e-9) + 1e-4


def test_its_memory_is_bounded() -> None:
    found = Attainment([CHAT])
    rng = random.Random(1)
    for turn in range(20_000):
        found.outcome("chat").note("itl", turn * 1.0, rng.lognormvariate(-3, 1), 0.1)
    slices = found._windows["chat"]["itl"]._slices
    assert len(slices) <= WINDOW_S / 10.0 + 1
