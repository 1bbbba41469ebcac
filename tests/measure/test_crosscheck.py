"""The client's TTFT against a server's histogram, built from the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from paceline.measure.crosscheck import crosscheck
from paceline.measure.records import ScrapeRecord
from paceline.measure.scrape import parse_metrics
from paceline.measure.verdict import Level
from tests.measure.making import run_of

EDGES = (0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, math.inf)


def reading(
    ttft_s: Sequence[float], t_s: float, prefix: str = "vllm:", extra: str = "", segment: int = 0
) -> ScrapeRecord:
    """What a server's /metrics would say after these first tokens."""
    stem = f"{prefix}time_to_first_token_seconds"
    lines = [f"# TYPE {stem} histogram"]
    for edge in EDGES:
        label = "+Inf" if math.isinf(edge) else f"{edge:g}"
        lines.append(f'{stem}_bucket{{model_name="m",le="{label}"}} {sum(v <= edge for v in ttft_s)}')
    lines += [f'{stem}_count{{model_name="m"}} {len(ttft_s)}', f'{stem}_sum{{model_name="m"}} {sum(ttft_s)}']
    values, histograms = parse_metrics("\n".join(lines) + "\n" + extra)
    return ScrapeRecord(t_s=t_s, values=values, histograms=histograms, segment=segment)


CLIENT = [50.0 + i for i in range(100)]  # milliseconds
SERVER = [value / 1e3 - 0.002 for value in CLIENT]  # the network added two
EARLIER = [9.0] * 7  # what the server had served before


@pytest.mark.parametrize("prefix", ["vllm:", "sglang:", "paceline_"])
def test_agreement(prefix: str) -> None:
    scrapes = [reading(EARLIER, -1.0, prefix), reading(EARLIER + SERVER[:50], 5.0, prefix)]
    scrapes.append(reading(EARLIER + SERVER, 11.0, prefix))
    found = crosscheck(run_of(CLIENT), scrapes)
    assert found.comparable
    assert found.agrees is True
    row = found.means[0]
    assert row.client == pytest.approx(0.0995)
    assert row.server == pytest.approx(0.0975)
    assert [bucket.q for bucket in found.buckets] == [50.0, 90.0, 95.0, 99.0]
    assert list(found.reasons()) == []


def test_network_is_a_note_and_the_impossible_is_not() -> None:
    run = run_of(CLIENT)
    slow = crosscheck(run, [reading([], 0.0), reading([v - 0.03 for v in SERVER], 11.0)])
    assert slow.agrees is False
    assert [reason.level for reason in slow.reasons()] == [Level.NOTE]
    early = crosscheck(run, [reading([], 0.0), reading([v + 0.03 for v in SERVER], 11.0)])
    assert [reason.level for reason in early.reasons()] == [Level.DEGRADED]
    assert not all(bucket.agrees for bucket in early.buckets)


def test_others_on_the_server_make_it_incomparable() -> None:
    found = crosscheck(run_of(CLIENT), [reading([], 0.0), reading(SERVER * 2, 11.0)])
    assert not found.comparable
    assert "others" in found.why
    assert found.agrees is None


def test_restart_and_absence() -> None:
    run = run_of(CLIENT)
    assert crosscheck(run, []).agrees is None
    assert crosscheck(run, [reading(SERVER, 0.0), reading([], 11.0)]).agrees is None
    broken = [ScrapeRecord(t_s=float(i), error="connection refused") for i in range(3)]
    assert "refused" in crosscheck(run, broken).why


def test_segments_are_compared_each_for_itself() -> None:
    """Between the segments of a resumed run the server served somebody else."""
    scrapes = [reading([], 0.0), reading(SERVER[:50], 5.0), reading(SERVER[:50] + [3.0] * 40, 50.0, segment=1)]
    scrapes.append(reading(SERVER[:50] + [3.0] * 40 + SERVER[50:], 55.0, segment=1))
    assert crosscheck(run_of(CLIENT), scrapes).agrees is True


def test_deltas_of_counters() -> None:
    def extra(hits: int, queries: int, preempted: int, waiting: int) -> str:
        return (
            f"vllm:prefix_cache_hits_total {hits}\nvllm:prefix_cache_queries_total {queries}\n"
            f"vllm:num_preemptions_total {preempted}\nvllm:num_requests_waiting {waiting}\n"
        )

    scrapes = [
        reading([], 0.0, extra=extra(100, 1000, 3, 0)),
        reading(SERVER[:50], 5.0, extra=extra(200, 1500, 4, 9)),
        reading(SERVER, 11.0, extra=extra(400, 2000, 5, 1)),
    ]
    found = crosscheck(run_of(CLIENT), scrapes)
    assert found.cache_hit_share == pytest.approx(0.3)
    assert (found.preemptions, found.max_waiting) == (2, 9)
