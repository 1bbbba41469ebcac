"""Readings of a server's /metrics, mapped to one set of names whatever engine it is.

Counters only grow, so a run's share is the difference of its last and first reading. Series of several labels (models,
engine replicas) are summed; ratios are averaged.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from paceline.measure.alarm import clock
from paceline.measure.folder import RowWriter
from paceline.measure.records import ScrapeRecord

# Our name -> the names without their engine's prefix (`vllm:`, `sglang:`, `paceline_`, `trtllm_`, `llamacpp:`).
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("num_requests_running", "num_running_reqs", "requests_running", "requests_processing"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "requests_waiting", "requests_deferred"),
    "kv_used_ratio": (
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "kv_usage_ratio",
        "token_usage",
        "kv_cache_usage_ratio",
    ),
    "prefix_queries_tokens": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "prefix_cache_queries"),
    "prefix_hits_tokens": (
        "prefix_cache_hits_total",
        "gpu_prefix_cache_hits_total",
        "cached_tokens_total",
        "prefix_cache_hits",
    ),
    "cache_hit_ratio": ("cache_hit_rate",),
    "preemptions": ("num_preemptions_total", "preemptions_total", "num_retractions_total", "num_retracted_reqs_total"),
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "requests_ok": ("request_success_total", "num_requests_total", "requests_total"),
}
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "ttft_s": ("time_to_first_token_seconds",),
    "itl_s": ("inter_token_latency_seconds", "time_per_output_token_seconds", "inter_token_seconds"),
    "e2e_s": ("e2e_request_latency_seconds", "request_latency_seconds", "request_duration_seconds"),
    "queue_s": ("request_queue_time_seconds", "queue_time_seconds"),
}
_KNOWN = frozenset(name for names in (*NAMES.values(), *HISTOGRAMS.values()) for name in names)
_PLAIN_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^{}]*\})? (?:[-+]?[0-9.]+(?:e[-+]?[0-9]+)?|NaN|[-+]Inf)")
_PART_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
_RATIOS = frozenset(("kv_used_ratio", "cache_hit_ratio"))
_PREFIXES = {
    "vllm:": "vllm",
    "sglang:": "sglang",
    "paceline:": "paceline",
    "paceline_": "paceline",
    "trtllm:": "trtllm",
    "trtllm_": "trtllm",
    "llamacpp:": "llama.cpp",
    "tgi_": "tgi",
}


def parse_metrics(text: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """(values, histograms) by our names of a Prometheus text. Raises ValueError for something else.

    A histogram's `sum` and `count` are among the values as NAME_sum and NAME_count; its buckets are cumulative by `le`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[str, list[float]] = {}
    buckets: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(_without_unknown(text)):
        for sample in family.samples:
            name = bare(sample.name)
            if name.endswith("_bucket") and "le" in sample.labels:
                edges = buckets.setdefault(name.removesuffix("_bucket"), {})
                edges[sample.labels["le"]] = edges.get(sample.labels["le"], 0.0) + sample.value
            else:
                series.setdefault(name, []).append(sample.value)
    values: dict[str, float] = {}
    for ours, names in NAMES.items():
        # An engine that renames a metric exposes both names for a while: the first counts, never the sum.
        found = next((series[name] for name in names if name in series), None)
        if found is not None:
            values[ours] = sum(found) / len(found) if ours in _RATIOS else sum(found)
    histograms: dict[str, dict[str, float]] = {}
    for ours, names in HISTOGRAMS.items():
        stem = next((name for name in names if f"{name}_count" in series), None)
        if stem is not None:
            values[f"{ours}_sum"] = sum(series.get(f"{stem}_sum", ()))
            values[f"{ours}_count"] = sum(series[f"{stem}_count"])
            histograms[ours] = buckets.get(stem, {})
    return values, histograms


def _without_unknown(text: str) -> str:
    """The text without plain samples of which nothing is made: most of what a server tells, and slow to parse."""
    return "\n".join(
        line for line in text.split("\n") if (sample := _PLAIN_SAMPLE.fullmatch(line)) is None or _is_known(sample[1])
    )


@cache
def _is_known(name: str) -> bool:
    name = bare(name)
    return name in _KNOWN or _PART_OF_HISTOGRAM.sub("", name) in _KNOWN


def bare(name: str) -> str:
    """A metric's name without its engine's prefix."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def engine_of(text: str) -> str | None:
    """Which engine a metrics text is of, by its prefix."""
    return next((engine for prefix, engine in _PREFIXES.items() if f"\n{prefix}" in f"\n{text}"), None)


def metrics_url(base: str, given: str | None) -> str | None:
    """Where to read metrics: as given, else /metrics of the host; None for "" (do not)."""
    if given is not None:
        return given or None
    parts = urlsplit(base)
    return f"{parts.scheme}://{parts.netloc}/metrics"


def scrape(client: httpx.Client, url: str, *, t0: float, segment: int = 0) -> ScrapeRecord:
    """One reading. A server that has none, or fails, gives a row with `error`, never a made-up zero."""
    start = clock()
    try:
        response = client.get(url, timeout=5.0)
        response.raise_for_status()
        ended = clock()
        values, histograms = parse_metrics(response.text)
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ScrapeRecord(t_s=round(clock() - t0, 6), segment=segment, error=reason[:200])
    return ScrapeRecord(
        t_s=round((start + ended) / 2 - t0, 6),
        took_s=round(ended - start, 6),
        segment=segment,
        values=values,
        histograms=histograms,
    )


class Scraper:
    """Reads every `every_s` in a thread of the runner's process, which carries no load itself."""

    def __init__(self, url: str, path: Path, make_client: Callable[[], httpx.Client], every_s: float) -> None:
        self._url = url
        self._make_client = make_client
        self._every_s = every_s
        self._writer = RowWriter(path)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.rows = 0
        self.failures = 0

    def start(self, t0: float, segment: int) -> None:
        """Take the first reading now and go on until `stop`."""
        self._thread = threading.Thread(target=self._run, args=(t0, segment), daemon=True)
        self._thread.start()

    def _run(self, t0: float, segment: int) -> None:
        """On its thread. A disk that is full ends the readings, not the run: its workers will say so themselves."""
        with contextlib.suppress(OSError):
            self._read(t0, segment)

    def _read(self, t0: float, segment: int) -> None:
        with self._make_client() as client:
            last = False
            while True:
                row = scrape(client, self._url, t0=t0, segment=segment)
                self._writer.write(row)
                self._writer.flush()
                self.rows += 1
                self.failures += bool(row.error)
                if last:
                    return
                last = self._over.wait(self._every_s)

    def stop(self) -> None:
        """One last reading, then the end."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=15.0)
        with contextlib.suppress(OSError):
            self._writer.close()
