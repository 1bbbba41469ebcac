"""The client's numbers against the server's own /metrics over the same stretch of time.

Means are compared as sum / count, percentiles by the bucket they fall in; a histogram tells no more than that. The
server's clock starts when it has read the request and stops before the network, so the client may see a little more,
never less: less means that one of the two counts wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.measure.metrics import RequestMetrics, value_of
from paceline.measure.records import ScrapeRecord
from paceline.measure.slo import format_seconds
from paceline.measure.stats import PERCENTILES, mean, percentile
from paceline.measure.summary import RunMetrics
from paceline.measure.verdict import Level, Reason

TOLERANCE_S = 0.005
COUNT_TOLERANCE = 0.02  # of requests: beyond it others used the server too, and nothing can be compared
# Server histogram -> the client's metric that means the same.
PAIRS = {"ttft_s": "ttft_service", "e2e_s": "e2e_service", "itl_s": "itl"}


@dataclass(frozen=True, slots=True)
class MeanRow:
    """One latency seen from both ends, in seconds."""

    name: str
    client: float | None
    server: float | None
    client_n: int
    server_n: float
    agrees: bool | None  # None: not comparable


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A percentile of TTFT: the client's value and the server's bucket (low, high]."""

    q: float
    client: float
    low: float
    high: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """What the server said of itself between the first and the last reading."""

    why: str  # "" when comparable, else the reason that it is not
    means: tuple[MeanRow, ...] = ()
    buckets: tuple[BucketRow, ...] = ()
    cache_hit_share: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    max_running: float | None = None
    max_waiting: float | None = None
    max_kv_used: float | None = None
    readings: int = 0

    @property
    def comparable(self) -> bool:
        return not self.why

    @property
    def agrees(self) -> bool | None:
        """Whether mean and percentiles of TTFT agree; None when that cannot be said."""
        ttft = next((row for row in self.means if row.name == "ttft_s"), None)
        if not self.comparable or ttft is None or ttft.agrees is None:
            return None
        return ttft.agrees and all(row.agrees for row in self.buckets)

    def reasons(self) -> Iterable[Reason]:
        """What this says about the run's verdict."""
        row = next((row for row in self.means if row.name == "ttft_s"), None)
        if row is None or row.client is None or row.server is None or row.agrees is not False:
            return
        text = f"mean TTFT: the client saw {format_seconds(row.client)}, the server {format_seconds(row.server)}"
        if row.client < row.server:
            yield Reason(Level.DEGRADED, "crosscheck", f"{text}; less than the server's own cannot be")
        else:
            yield Reason(Level.NOTE, "crosscheck", f"{text}; the rest was network, or a queue before its clock starts")


def crosscheck(run: RunMetrics, scrapes: Sequence[ScrapeRecord]) -> CrossCheck:
    """Compare a run with the server's readings; needs one before and one after it."""
    good = [scrape for scrape in scrapes if not scrape.error and (scrape.values or scrape.histograms)]
    if len(good) < 2:
        errors = sorted({scrape.error for scrape in scrapes if scrape.error})
        return CrossCheck(f"no readings of the server's metrics ({errors[0]})" if errors else "no server metrics")
    ends = _segment_ends(good)
    value, histogram = _deltas(ends)
    means = [_mean_row(name, value, run.requests) for name in PAIRS if f"{name}_count" in good[-1].values]
    ttft = next((row for row in means if row.name == "ttft_s"), None)
    queries, hits = value("prefix_queries_tokens"), value("prefix_hits_tokens")
    if queries is None and hits is not None:  # SGLang counts hits against all prompt tokens
        queries = value("prompt_tokens")
    why = ""
    if ttft is None:
        why = "the server has no TTFT histogram under a name we know"
    elif ttft.agrees is None:
        why = f"the server counted {ttft.server_n:g} first tokens, this client saw {ttft.client_n}: others used it too"
    return CrossCheck(
        why=why,
        means=tuple(means),
        buckets=() if why else tuple(_bucket_rows(histogram("ttft_s"), run.requests)),
        cache_hit_share=hits / queries if queries and hits is not None else None,
        preemptions=value("preemptions"),
        prompt_tokens=value("prompt_tokens"),
        generation_tokens=value("generation_tokens"),
        max_running=_highest(good, "running"),
        max_waiting=_highest(good, "waiting"),
        max_kv_used=_highest(good, "kv_used_ratio"),
        readings=len(good),
    )


def _segment_ends(scrapes: Sequence[ScrapeRecord]) -> list[tuple[ScrapeRecord, ScrapeRecord]]:
    """First and last reading of each segment: between segments of a resumed run the server may have served others."""
    groups: dict[int, list[ScrapeRecord]] = {}
    for scrape in scrapes:
        groups.setdefault(scrape.segment, []).append(scrape)
    return [(group[0], group[-1]) for group in groups.values() if len(group) > 1]


def _deltas(
    ends: Sequence[tuple[ScrapeRecord, ScrapeRecord]],
) -> tuple[Callable[[str], float | None], Callable[[str], dict[float, float]]]:
    """Growth of a counter (None: absent, or it shrank, so the server restarted) and of a histogram's buckets."""

    def value(name: str) -> float | None:
        total = 0.0
        for first, last in ends:
            if name not in last.values:
                return None
            grown = last.values[name] - first.values.get(name, 0.0)
            if grown < 0.0:
                return None
            total += grown
        return total if ends else None

    def histogram(name: str) -> dict[float, float]:
        total: dict[float, float] = {}
        for first, last in ends:
            before = first.histograms.get(name, {})
            for edge, count in last.histograms.get(name, {}).items():
                at = math.inf if edge in ("+Inf", "inf", "Inf") else float(edge)
                total[at] = total.get(at, 0.0) + count - before.get(edge, 0.0)
        return dict(sorted(total.items()))

    return value, histogram


def _client_values(name: str, requests: Sequence[RequestMetrics]) -> list[float]:
    metric = PAIRS[name]
    if metric == "itl":
        return [gap for request in requests for gap in request.itl_s]
    values = (value_of(metric, request) for request in requests)
    return [value for value in values if value is not None]


def _mean_row(name: str, value: Callable[[str], float | None], requests: Sequence[RequestMetrics]) -> MeanRow:
    ours = _client_values(name, requests)
    total, count = value(f"{name}_sum"), value(f"{name}_count")
    client = mean(ours)
    server = total / count if total is not None and count else None
    agrees: bool | None = None
    same_requests = name == "itl_s" or (count is not None and abs(count - len(ours)) <= COUNT_TOLERANCE * len(ours))
    if client is not None and server is not None and same_requests:
        agrees = abs(client - server) <= TOLERANCE_S
    return MeanRow(name, client, server, len(ours), count or 0.0, agrees)


def _bucket_rows(buckets: dict[float, float], requests: Sequence[RequestMetrics]) -> Iterable[BucketRow]:
    ours = _client_values("ttft_s", requests)
    count = max(buckets.values(), default=0.0)
    if not ours or count <= 0.0:
        return
    edges = list(buckets)
    for q in PERCENTILES:
        rank = math.ceil(round(q * count / 100.0, 9))
        place = next(i for i, edge in enumerate(edges) if buckets[edge] >= rank)
        low, high = (edges[place - 1] if place else 0.0), edges[place]
        client = percentile(ours, q, "nearest-rank")
        assert client is not None
        # What the network added may have carried a value near an edge into the next bucket.
        yield BucketRow(q, client, low, high, agrees=client > low and client - TOLERANCE_S <= high)


def _highest(scrapes: Sequence[ScrapeRecord], name: str) -> float | None:
    return max((scrape.values[name] for scrape in scrapes if name in scrape.values), default=None)
