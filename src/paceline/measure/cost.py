"""What a run's requests and tokens cost, from the price of the machine by the hour.

The whole machine is paid for the whole span, whatever it did meanwhile; failed requests cost and are not counted as
delivered. Hence cost per good request: what the promise costs, not what the attempt costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.measure.summary import RunMetrics, Throughput


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of `price_per_hour`. None: nothing was delivered, or its amount is unknown."""

    price_per_hour: float
    seconds: float
    total: float
    per_request: float | None
    per_good_request: float | None  # met every objective
    per_million_input: float | None
    per_million_output: float | None
    per_million_total: float | None


def cost_of(run: RunMetrics, price_per_hour: float) -> Cost | None:
    """Cost over the whole run; None for a run without a span. ConfigError for a price that is none."""
    if not math.isfinite(price_per_hour) or price_per_hour <= 0.0:
        raise ConfigError(f"the price per hour must be a number above 0, not {price_per_hour}")
    if run.whole is None:
        return None
    return _cost(run.whole, price_per_hour, run.goodput.good if run.goodput.share is not None else None)


def _cost(span: Throughput, price_per_hour: float, good: int | None) -> Cost:
    total = price_per_hour * span.span.seconds / 3600.0

    def each(rate_per_s: float | None, scale: float = 1.0) -> float | None:
        amount = None if rate_per_s is None else rate_per_s * span.span.seconds
        return scale * total / amount if amount else None

    return Cost(
        price_per_hour=price_per_hour,
        seconds=span.span.seconds,
        total=total,
        per_request=each(span.requests.per_s),
        per_good_request=total / good if good else None,
        per_million_input=each(span.input_tokens.per_s, 1e6),
        per_million_output=each(span.output_tokens.per_s, 1e6),
        per_million_total=each(span.total_tokens.per_s, 1e6),
    )
