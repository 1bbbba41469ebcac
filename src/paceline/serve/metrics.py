"""What /metrics shows: names in vLLM's style under `paceline:`, so that its dashboards work after a rename.

Histograms that the HTTP side observes are made here once and observed as things happen, on the event loop alone. What
the engine counts is read from its latest stats when somebody scrapes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paceline.core.step import Finish, RequestSpec
from paceline.engine.messages import EngineStats

# vLLM's bounds and finer ones between them: its floors of 10 ms and 0.3 s are too coarse for small models.
TTFT_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (*(base * 10.0**power for power in range(-4, 1) for base in (1, 1.5, 2, 3, 5, 7.5)), 10.0, 30.0)
HOST_BUCKETS = tuple(base * 10.0**power for power in range(-5, -1) for base in (1, 1.5, 2, 3, 5, 7.5))
SIZE_BUCKETS = tuple(float(base * 10**power) for power in range(7) for base in (1, 2, 5))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)

ModelName = Callable[[], str]
disable_created_metrics()  # type: ignore[no-untyped-call]  # a timestamp beside every series helps nobody


class ServeMetrics:
    """All metrics of one server, in a registry of its own. `model_name` is asked when a value is first recorded."""

    def __init__(
        self, model_name: ModelName, stats: Callable[[], EngineStats], promises: Callable[[], dict[str, Any]]
    ) -> None:
        """`stats` and `promises` (`Attainment.report`, by class) are asked when somebody scrapes."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "from arrival to the first token", TTFT_BUCKETS)
        self.itl = self._histogram("inter_token_latency_seconds", "between tokens of one choice", ITL_BUCKETS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "from arrival to the end", REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "waiting in the scheduler", REQUEST_BUCKETS)
        self._prefill = self._histogram("request_prefill_time_seconds", "scheduled to first token", REQUEST_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "first to last token", REQUEST_BUCKETS)
        self._inference = self._histogram("request_inference_time_seconds", "scheduled to end", REQUEST_BUCKETS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean over a request's tokens after the first", ITL_BUCKETS
        )
        self._prompt = self._histogram("request_prompt_tokens", "prompt tokens of a request", SIZE_BUCKETS)
        self._generation = self._histogram("request_generation_tokens", "tokens of an answer", SIZE_BUCKETS)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", SIZE_BUCKETS)
        self.choices = self._histogram("request_params_n", "n of a request", CHOICE_BUCKETS)
        self._iteration = self._histogram("iteration_tokens_total", "tokens computed in a step", SIZE_BUCKETS)
        self._step = self._histogram("step_duration_seconds", "duration of a step", STEP_BUCKETS)
        self._scheduler = self._histogram(
            "scheduler_step_seconds", "time of the scheduler itself for one step: its plan and its commit", HOST_BUCKETS
        )
        self._bound = self._counter("steps", "steps by what kept them from being larger", "bound_by")
        self._rows = self._histogram("step_requests", "requests in a step's batch", SIZE_BUCKETS[:12])
        self._success = self._counter("request_success", "ended requests by reason", "finished_reason")
        self._sent = self._counter("class_requests", "requests that ended or were refused, by class", "class")
        self._good = self._counter("class_requests_good", "of those, answered inside all their targets", "class")
        self._cached = self._counter("prompt_tokens_cached", "prompt tokens taken from the prefix cache")
        self._aborted = self._counter("requests_aborted", "requests whose client went away or that the server ended")
        self._errors = self._counter("request_errors", "error answers by HTTP status and code", "status", "code")
        self._http = self._counter("http_requests", "HTTP answers", "path", "status")
        self.registry.register(_EngineCollector(model_name, stats))
        self.registry.register(_PromiseCollector(model_name, promises))

    def note_step(self, stats: EngineStats) -> None:
        """One message of the engine; heartbeats say nothing."""
        step = stats.last_step
        if step is not None:
            self._iteration.observe(step.tokens)
            self._step.observe(step.seconds)
            self._scheduler.observe(step.scheduler_s)
            self._rows.observe(step.rows)
            self._bound.labels(step.bound_by.value).inc()

    def note_finish(self, finish: Finish, spec: RequestSpec, tokens: int, reason: str) -> None:
        """One engine request has ended; `tokens` is how many its answer has."""
        self._success.labels(reason).inc()
        self._prompt.observe(len(spec.prompt))
        self._generation.observe(tokens)
        self._max_tokens.observe(spec.sampling.max_tokens)
        self._cached.labels().inc(finish.cached_tokens)
        if reason == "abort":
            self._aborted.labels().inc()
        if finish.scheduled_s is None:
            return
        self._queue.observe(finish.scheduled_s - finish.arrived_s)
        self._inference.observe(finish.finished_s - finish.scheduled_s)
        if finish.first_token_s is None:
            return
        self._prefill.observe(finish.first_token_s - finish.scheduled_s)
        decode = finish.finished_s - finish.first_token_s
        self._decode.observe(decode)
        if finish.output_tokens > 1:
            self._per_token.observe(decode / (finish.output_tokens - 1))

    def note_outcome(self, traffic_class: str, *, good: bool) -> None:
        """A request is over for its client, who did not leave by himself: was it answered inside all its targets?"""
        self._sent.labels(traffic_class).inc()
        if good:
            self._good.labels(traffic_class).inc()

    def note_cut_off(self, *, lost: bool) -> None:
        """A request ended without the engine's word: the engine is dead (`lost`), or its client has gone."""
        self._success.labels("error" if lost else "abort").inc()
        if not lost:
            self._aborted.labels().inc()

    def note_error(self, status: int, code: str) -> None:
        """An error went to a client, as an answer or at the end of a stream."""
        self._errors.labels(str(status), code).inc()

    def note_http(self, path: str, status: int) -> None:
        """An HTTP answer. `path` is that of a known endpoint: strangers must not grow the label's values."""
        self._http.labels(path, str(status)).inc()

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> _Histogram:
        histogram = _Histogram(f"paceline:{name}", meaning, buckets, self._model_name)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, meaning: str, *labels: str) -> _LateCounter:
        full = Counter(f"paceline:{name}", meaning, labelnames=("model_name", *labels), registry=self.registry)
        return _LateCounter(full, self._model_name)


class _Histogram(Collector):
    """A histogram for one event loop: a value, which every token is, costs a look-up and takes no lock."""

    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...], model_name: ModelName) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = bounds
        self._shown_bounds = (*map(floatToGoString, bounds), "+Inf")
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._model_name = model_name

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        return []  # nothing is read before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=("model_name",))
        if any(self._counts):
            buckets = list(zip(self._shown_bounds, accumulate(self._counts), strict=True))
            family.add_metric([self._model_name()], buckets, self._sum)
        yield family


class _LateCounter:
    def __init__(self, full: Counter, model_name: ModelName) -> None:
        self._full = full
        self._model_name = model_name

    def labels(self, *values: str) -> Counter:
        return self._full.labels(self._model_name(), *values)


class _EngineCollector(Collector):
    """The engine's own counters and gauges, as of its latest message."""

    def __init__(self, model_name: ModelName, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # nothing is read before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        core = stats.scheduler
        errors = stats.cost_error or (math.nan, math.nan)
        usage = core.kv_blocks_used / core.kv_blocks_total if core.kv_blocks_total else 0.0
        gauges = (
            ("num_requests_running", "requests in the running batch", core.num_running),
            ("num_requests_waiting", "requests waiting for their first or next turn", core.num_waiting),
            ("kv_cache_usage_perc", "share of KV blocks held by live requests; 1 is all", usage),
            ("kv_blocks_total", "KV blocks there are", core.kv_blocks_total),
            ("kv_blocks_used", "KV blocks held by live requests", core.kv_blocks_used),
            ("step_prediction_error_median", "median of |predicted - real| / real of a step's time", errors[0]),
            ("step_prediction_error_p95", "95th percentile of the same", errors[1]),
            ("kv_blocks_cached", "KV blocks kept for the prefix cache alone", core.kv_blocks_cached),
        )
        counters = (
            ("prompt_tokens", "prompt tokens computed or taken from the cache", core.prompt_tokens),
            ("generation_tokens", "tokens generated", core.generation_tokens),
            ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", core.prefix_queries_tokens),
            ("prefix_cache_hits", "prompt tokens found in the prefix cache", core.prefix_hits_tokens),
            ("num_preemptions", "requests put back to wait for want of KV blocks", core.preemptions),
            ("recomputed_tokens", "tokens whose KV was computed again after preemptions", core.recomputed_tokens),
            ("engine_steps", "steps of the engine", stats.steps),
            ("engine_step_seconds", "time spent in steps", stats.step_seconds),
            ("engine_step_tokens", "tokens computed in steps", stats.step_tokens),
            ("engine_request_errors", "requests that the engine ended with an error", stats.errors),
            ("near_boundary_draws", "draws that another batch might have decided otherwise", stats.near_boundary),
        )
        labels = ("model_name",)
        for name, meaning, value in gauges:
            gauge = GaugeMetricFamily(f"paceline:{name}", meaning, labels=labels)
            gauge.add_metric([self._model_name()], value)
            yield gauge
        for name, meaning, value in counters:
            counter = CounterMetricFamily(f"paceline:{name}", meaning, labels=labels)
            counter.add_metric([self._model_name()], value)
            yield counter


class _PromiseCollector(Collector):
    """How the promise of each class is kept, over the window of `Attainment`. What has no value has no series."""

    def __init__(self, model_name: ModelName, promises: Callable[[], dict[str, Any]]) -> None:
        self._model_name = model_name
        self._promises = promises

    def describe(self) -> list[Metric]:
        return []  # nothing is read before somebody scrapes

    def collect(self) -> Iterator[Metric]:
        attained = GaugeMetricFamily(
            "paceline:slo_attained",
            "share of the last five minutes' latencies inside their targets; quantity is ttft, itl or e2e",
            labels=("model_name", "class", "quantity"),
        )
        margin = GaugeMetricFamily(
            "paceline:slo_margin",
            "smallest surplus of these shares over what the class promises; below 0 a promise is broken",
            labels=("model_name", "class"),
        )
        for name, row in self._promises().items():
            for quantity in ("ttft", "itl", "e2e"):
                if row[quantity]["target_s"] is not None and row[quantity]["attained"] is not None:
                    attained.add_metric([self._model_name(), name, quantity], row[quantity]["attained"])
            if row["margin"] is not None:
                margin.add_metric([self._model_name(), name], row["margin"])
        yield attained
        yield margin
