"""Metrics of several engines under one set of names."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from paceline.measure.folder import read_rows
from paceline.measure.mockapi import MockConfig, MockProcess
from paceline.measure.records import ScrapeRecord
from paceline.measure.scrape import Scraper, engine_of, metrics_url, parse_metrics, scrape

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 2
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.6
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 100
vllm:prefix_cache_queries_created{engine="0"} 1.7e9
# TYPE vllm:gpu_prefix_cache_queries counter
vllm:gpu_prefix_cache_queries_total{engine="0"} 100
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 40
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 7
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 1
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1"} 2
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 2
vllm:time_to_first_token_seconds_sum{engine="0"} 2.5
vllm:time_to_first_token_seconds_sum{engine="1"} 0.1
vllm:time_to_first_token_seconds_count{engine="0"} 4
vllm:time_to_first_token_seconds_count{engine="1"} 2
"""


def test_vllm() -> None:
    values, histograms = parse_metrics(VLLM)
    assert values["running"] == 5
    assert values["kv_used_ratio"] == pytest.approx(0.4)
    assert values["prefix_queries_tokens"] == 100  # the old name of the same counter is not added
    assert values["prefix_hits_tokens"] == 40
    assert values["preemptions"] == 7
    assert values["ttft_s_sum"] == pytest.approx(2.6)
    assert values["ttft_s_count"] == 6
    assert histograms["ttft_s"] == {"0.1": 3, "+Inf": 6}
    assert "waiting" not in values  # what is not told is not made up


def test_what_nobody_asked_for_changes_nothing() -> None:
    others = [
        'vllm:step_seconds_bucket{le="0.1"} 1.0',
        'vllm:step_seconds_sum{engine="0"} 2.5e-07',
        "python_gc_objects_collected_total NaN",
        'process_info{text="a } b \\" c",other="{"} 1',
    ]
    lines = VLLM.splitlines()
    for place, other in enumerate(others):
        lines.insert(place * 7, other)
    assert parse_metrics("\n".join(lines)) == parse_metrics(VLLM)


@pytest.mark.parametrize(
    ("text", "engine", "name", "value"),
    [
        ("sglang:num_queue_reqs 4\n", "sglang", "waiting", 4),
        ("sglang:cache_hit_rate 0.5\n", "sglang", "cache_hit_ratio", 0.5),
        ("llamacpp:tokens_predicted_total 9\n", "llama.cpp", "generation_tokens", 9),
        ("paceline:num_requests_waiting 2\n", "paceline", "waiting", 2),
        ("paceline:prefix_cache_hits_total 3\n", "paceline", "prefix_hits_tokens", 3),
    ],
)
def test_other_engines(text: str, engine: str, name: str, value: float) -> None:
    assert engine_of(text) == engine
    assert parse_metrics(text)[0][name] == value


@pytest.mark.parametrize("text", ["<html><body>hello</body></html>", "no metrics", 'some{label="value"} number'])
def test_text_that_is_no_metrics(text: str) -> None:
    with pytest.raises(ValueError):
        parse_metrics(text)
    assert engine_of("up 1\n") is None


def test_where_metrics_are() -> None:
    assert metrics_url("http://h:8000/v1", None) == "http://h:8000/metrics"
    assert metrics_url("http://h:8000/v1", "http://other/m") == "http://other/m"
    assert metrics_url("http://h:8000/v1", "") is None


def test_readings_of_a_server_and_of_none(tmp_path: Path) -> None:
    def make() -> httpx.Client:
        return httpx.Client(trust_env=False)

    with MockProcess(MockConfig()) as mock:
        scraper = Scraper(f"{mock.url}/metrics", tmp_path / "server.jsonl", make, every_s=30)
        scraper.start(0.0, 0)
        scraper.stop()
        with make() as http:
            assert scrape(http, f"{mock.url}/v1/models", t0=0.0).error
    rows = list(read_rows(tmp_path / "server.jsonl", ScrapeRecord))
    assert len(rows) == 2  # one at the start, one at the stop
    assert all(row.values == {"prompt_tokens": 0.0, "generation_tokens": 0.0} and not row.error for row in rows)
    with make() as http:
        row = scrape(http, f"{mock.url}/metrics", t0=0.0)
    assert row.error
    assert row.values == {}
