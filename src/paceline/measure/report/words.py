"""Numbers and settings in words, the same on paper and in a terminal."""

from __future__ import annotations

import math

from paceline.measure.gate_parser import format_value
from paceline.measure.plan import Arrivals, BenchPlan, Length
from paceline.measure.stats import Quantile

NBSP = "\u00a0"  # a number and its unit stay together


def duration(seconds: float | None, *, missing: str = "–") -> str:
    """147 ms, 1.52 s, 3 min 20 s: three significant digits, enough to read and too few to pretend."""
    if seconds is None:
        return missing
    if math.isinf(seconds):
        return "∞"
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.3g}{NBSP}µs" if seconds else "0"
    if size < 0.9995:
        return f"{seconds * 1e3:.3g}{NBSP}ms"
    if size < 100.0:
        return f"{seconds:.3g}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest}{NBSP}s" if rest else f"{minutes}{NBSP}min"
    return f"{minutes // 60}{NBSP}h {minutes % 60}{NBSP}min"


def count(value: float | None, *, missing: str = "–") -> str:
    """1,234 or 12.3: whole numbers are whole."""
    if value is None:
        return missing
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def percent(value: float | None, *, missing: str = "–") -> str:
    return missing if value is None else f"{100 * value:.3g}{NBSP}%"


def shares(parts: dict[str, float]) -> str:
    """Parts of a whole in words, the largest first; what is below half a per cent is left out."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {percent(share)}" for name, share in ordered if share >= 0.005)


def money(value: float | None) -> str:
    """An amount with two significant digits and no exponent: 0.000096, 1.6, 240."""
    if value is None:
        return "–"
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0.0 else 0
    return f"{value:,.{digits}f}"


def between(low: float | None, high: float | None) -> str:
    """12.1 … 15 ms: the unit once where both share it; "?" for an end that is not known."""
    first, second = duration(low, missing="?"), duration(high, missing="?")
    if NBSP in first and NBSP in second and first.split(NBSP)[1:] == second.split(NBSP)[1:]:
        first = first.split(NBSP)[0]
    return f"{first} … {second}"


def interval(quantile: Quantile) -> str:
    """The interval of a percentile; an open end where n is too small for that bound."""
    return "" if quantile.value is None else between(quantile.low, quantile.high)


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def length(spec: Length) -> str:
    """A length distribution in words."""
    if spec.kind == "uniform":
        return f"{spec.low:g} to {spec.high:g}"
    if spec.kind == "lognormal":
        return f"log-normal around {spec.value:g} (σ {spec.sigma:g})"
    return f"{spec.value:g}"


def load(plan: BenchPlan, axis: str = "") -> str:
    """What was sent, and when, in one sentence; of a sweep, whose `axis` each point sets for itself."""
    spec, prompts = plan.load, plan.prompts
    if spec.arrivals is Arrivals.CLOSED:
        slots = "as many slots as the point says" if axis else plural(spec.concurrency or 0, "slot")
        when = f"{slots} in a closed loop, each asking again when it was answered"
    elif spec.arrivals is Arrivals.TRACE:
        when = "arrivals replayed from a trace"
    else:
        kind = {"constant": "evenly spaced", "poisson": "Poisson", "gamma": f"gamma (shape {spec.burstiness:g})"}
        rate = "at each point's own rate" if axis else f"at {spec.rate:g} per second"
        when = f"{kind[spec.arrivals.value]} arrivals {rate}"
        if spec.ramp_to is not None:
            when += f", rising to {spec.ramp_to:g}"
        if spec.burst_rate is not None:
            when += f", {spec.burst_rate:g} for {spec.burst_for_s:g} s of every {spec.burst_every_s:g} s"
    if spec.max_concurrency is not None:
        when += f", at most {spec.max_concurrency} at a time"
    if plan.trace is not None:
        what = "prompts and lengths from " + ("a trace" if spec.arrivals is not Arrivals.TRACE else "it")
    elif prompts.file is not None:
        what = f"prompts from a file, {length(prompts.output)} output tokens"
    else:
        what = f"{length(prompts.input)} prompt tokens and {length(prompts.output)} output tokens each"
    if prompts.prefix_tokens:
        what += f", {prompts.prefix_tokens} of them shared by {percent(prompts.prefix_share)} of the requests"
    if prompts.turns.kind != "fixed" or prompts.turns.value > 1:
        what += f", in conversations of {length(prompts.turns)} turns"
    sentence = f"{when}; {what}."
    return sentence[0].upper() + sentence[1:]


__all__ = ["count", "duration", "format_value", "interval", "length", "load", "percent", "plural", "shares"]
