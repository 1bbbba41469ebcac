"""Service level objectives of one request, and goodput: the share of all requests *sent* that met every one of them.

    parse_slos("ttft<=500ms, tpot<=50ms, itl_p99<=200ms")

A request is good when it succeeded and every objective that applies to it holds. An undefined metric does not hold.
An objective that has no meaning for a request (TPOT of a single token) is passed over; a request to which none
applies is counted apart and is in neither half of the fraction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.measure.distributions import binomial_interval
from paceline.measure.metrics import LATENCIES, POOLED, RequestMetrics, applies, value_of

_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(us|µs|ms|s|min|h)", re.IGNORECASE)
_SLO = re.compile(r"([a-z0-9_.]+)\s*(<=|<|≤)\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slo:
    """One objective of a request: `metric` at or below `bound_s` seconds."""

    metric: str
    bound_s: float

    def __str__(self) -> str:
        return f"{self.metric} <= {format_seconds(self.bound_s)}"

    def holds(self, request: RequestMetrics) -> bool | None:
        """None: has no meaning for this request."""
        if not applies(self.metric, request):
            return None
        value = value_of(self.metric, request)
        return request.ok and value is not None and value <= self.bound_s


@dataclass(frozen=True, slots=True)
class Goodput:
    """`share` is None when nothing could be judged; its interval is Clopper-Pearson's at 95 %."""

    slos: tuple[Slo, ...]
    sent: int
    good: int
    not_applicable: int
    share: float | None
    low: float | None
    high: float | None
    per_s: float | None


def parse_duration(text: str) -> float:
    """Seconds of "500ms", "1.5 s", "200us", "2min", "1h". A bare number is refused: nobody can tell ms from s later."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text.strip()!r} is not a duration; write a number and a unit: 500ms, 1.5s, 200us, 2min, 1h"
        )
    return float(match[1]) * _UNITS[match[2].lower()]


def format_seconds(seconds: float) -> str:
    """A duration as `parse_duration` reads it, in the unit people use for its size."""
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "∞" if seconds > 0 else "undefined"
    if abs(seconds) < 1e-3 and seconds:
        return f"{seconds * 1e6:.4g}us"
    return f"{seconds * 1e3:.4g}ms" if abs(seconds) < 1.0 else f"{seconds:.4g}s"


def check_metric(name: str) -> str:
    """The canonical name of a per-request latency; ConfigError names the known ones."""
    name = name.lower().removesuffix("_response")
    if name in LATENCIES or re.fullmatch(r"(itl|icl)_p[0-9]{1,2}(\.[0-9]+)?", name):
        return name
    known = ", ".join(sorted(LATENCIES)) + ", " + ", ".join(f"{name}_p99" for name in POOLED)
    raise ConfigError(f"unknown latency {name!r}; known are {known}")


def parse_slo(text: str) -> Slo:
    match = _SLO.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text.strip()!r} is not an objective; write one like ttft<=500ms or itl_p99<=100ms")
    return Slo(check_metric(match[1]), parse_duration(match[3]))


def parse_slos(text: str | Iterable[str]) -> tuple[Slo, ...]:
    """Objectives separated by commas, or a list of them; a metric may appear once."""
    parts = text.split(",") if isinstance(text, str) else [part for entry in text for part in entry.split(",")]
    slos = tuple(parse_slo(part) for part in parts if part.strip())
    names = [slo.metric for slo in slos]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} has more than one objective; state the stricter one alone")
    return slos


def goodput(requests: Sequence[RequestMetrics], slos: Sequence[Slo], seconds: float | None) -> Goodput:
    """Goodput of all sent `requests` over a run of `seconds`. Without objectives a success is good."""
    good = not_applicable = 0
    for request in requests:
        answers = [answer for answer in (slo.holds(request) for slo in slos) if answer is not None]
        if slos and not answers:
            not_applicable += 1
        elif request.ok and all(answers):
            good += 1
    judged = len(requests) - not_applicable
    low, high = binomial_interval(good, judged) if judged else (None, None)
    return Goodput(
        slos=tuple(slos),
        sent=len(requests),
        good=good,
        not_applicable=not_applicable,
        share=good / judged if judged else None,
        low=low,
        high=high,
        per_s=good / seconds if seconds and judged else None,
    )
