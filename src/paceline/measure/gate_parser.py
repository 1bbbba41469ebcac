"""The language of gates: one line says what a run must show.

p95 ttft <= 500ms                     a percentile of a latency (also p99.9, median)
p99 itl <= 80ms                       pooled gaps per token;  itl_p99 is a request's own percentile
mean tpot <= 40ms     max e2e <= 30s  means and maxima
p95 ttft[chat] <= 300ms               of one traffic class
goodput >= 95%                        under the run's objectives, or stated:
goodput(ttft<=500ms, tpot<=50ms) >= 95%
success >= 99%        error_rate <= 1%
timeouts <= 0         violations(ttft > 1s) <= 3
output_throughput >= 900              tokens/s (request_throughput: requests/s); plateau.output_throughput
p95 ttft <= baseline + 10%            against a saved run: also 1.1 * baseline, 110% of baseline, baseline + 20ms
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.measure.metrics import LATENCIES, POOLED
from paceline.measure.slo import Slo, check_metric, format_seconds, parse_duration, parse_slos

Kind = Literal["percentile", "mean", "max", "share", "count", "rate"]
Unit = Literal["s", "share", "count", "per_s"]

SHARES = {"goodput": ">=", "success": ">=", "error_rate": "<="}
COUNTS = ("errors", "timeouts", "rejected", "violations")
RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")

_CALL = re.compile(r"(?P<name>[a-z0-9_.]+)\s*\((?P<inside>[^()]*)\)", re.IGNORECASE)
_STATISTIC = re.compile(r"(?:(?P<q>p[0-9]{1,2}(?:\.[0-9]+)?|median)|(?P<mean>mean|avg)|(?P<max>max))", re.IGNORECASE)
_CLASS = re.compile(r"\[([^\[\]]+)\]$")
_NUMBER = r"[0-9]*\.?[0-9]+"


@dataclass(frozen=True, slots=True)
class Bound:
    """`value` alone, or factor * baseline + offset. Seconds, shares (0..1), counts or rates per second."""

    value: float | None = None
    factor: float = 1.0
    offset: float = 0.0

    @property
    def relative(self) -> bool:
        return self.value is None

    def against(self, baseline: float) -> float:
        return self.value if self.value is not None else self.factor * baseline + self.offset


@dataclass(frozen=True, slots=True)
class Gate:
    """One parsed gate. `slos` are those of goodput(...) or the one objective of violations(...)."""

    text: str
    kind: Kind
    metric: str
    unit: Unit
    upper: bool  # the bound is an upper one
    strict: bool  # < or >, not <= or >=
    bound: Bound
    q: float | None = None
    traffic_class: str | None = None
    plateau: bool = False
    slos: tuple[Slo, ...] = ()

    def admits(self, value: float, bound: float) -> bool:
        """Whether one value is on the right side of a bound."""
        if self.strict:
            return value < bound if self.upper else value > bound
        return value <= bound if self.upper else value >= bound


def parse_gate(text: str) -> Gate:
    """A gate from its line; ConfigError says what is wrong and how it should look."""
    line = " ".join(text.split())
    subject, op, bound_text = _split(line)
    strict, upper = op in ("<", ">"), op in ("<", "<=")
    traffic_class = None
    if match := _CLASS.search(subject):
        traffic_class, subject = match[1].strip(), subject[: match.start()].strip()
    plateau = subject.lower().startswith("plateau.")
    subject = subject[len("plateau.") :] if plateau else subject
    kind, metric, q, slos = _subject(subject, line)
    if plateau and kind != "rate":
        raise ConfigError(f"{line!r}: only throughputs have a plateau figure")
    _check_direction(kind, metric, upper, line)
    unit: Unit = {"share": "share", "count": "count", "rate": "per_s"}.get(kind, "s")  # type: ignore[assignment]
    bound = _bound(bound_text, unit, line)
    if metric == "violations" and bound.relative:
        raise ConfigError(f"{line!r}: a count of violations has a number for its bound")
    return Gate(line, kind, metric, unit, upper, strict, bound, q, traffic_class, plateau, slos)


def _split(line: str) -> tuple[str, str, str]:
    depth, found = 0, None
    for match in re.finditer(r"[()]|<=|>=|≤|≥|==|=|<|>", line):
        mark = match[0]
        depth += {"(": 1, ")": -1}.get(mark, 0)
        if depth == 0 and mark not in "()":
            if found is not None:
                raise ConfigError(f"{line!r} has more than one comparison; write one gate per line")
            found = match
    if found is None:
        raise ConfigError(f"{line!r} is not a gate; write one like: p95 ttft <= 500ms, goodput >= 95%")
    op = {"≤": "<=", "≥": ">="}.get(found[0], found[0])
    if op in ("=", "=="):
        raise ConfigError(f"{line!r}: a measured value never equals a bound; use <= or >=")
    return line[: found.start()].strip(), op, line[found.end() :].strip()


def _subject(subject: str, line: str) -> tuple[Kind, str, float | None, tuple[Slo, ...]]:
    name = subject.lower()
    if call := _CALL.fullmatch(subject):
        name = call["name"].lower()
        if name == "goodput":
            return "share", name, None, parse_slos(call["inside"])
        if name == "violations":
            # Written as what must not happen: violations(ttft > 1s). The objective is its opposite.
            return "count", name, None, parse_slos(call["inside"].replace(">=", "<").replace(">", "<="))
        statistic = _STATISTIC.fullmatch(name)
        if statistic is None:
            raise ConfigError(f"{line!r}: unknown function {name!r}; known are goodput(...), violations(...), p95(...)")
        return _latency(statistic, call["inside"].strip(), line)
    if name in SHARES:
        return "share", name, None, ()
    if name == "violations":
        raise ConfigError(f"{line!r}: say of what, as in violations(ttft > 1s) <= 3")
    if name in COUNTS:
        return "count", name, None, ()
    if name in RATES:
        return "rate", name, None, ()
    words = name.split()
    if len(words) == 2:
        for first, second in (words, reversed(words)):
            if statistic := _STATISTIC.fullmatch(first):
                return _latency(statistic, second, line)
    known = ", ".join([*LATENCIES, *POOLED, *SHARES, *COUNTS, *RATES])
    raise ConfigError(f"{line!r}: cannot read {subject!r}; write a percentile and a metric (p95 ttft); known: {known}")


def _latency(statistic: re.Match[str], metric: str, line: str) -> tuple[Kind, str, float | None, tuple[Slo, ...]]:
    metric = metric.lower()
    if metric not in POOLED:
        try:
            metric = check_metric(metric)
        except ConfigError as error:
            raise ConfigError(f"{line!r}: {error}") from None
    if statistic["mean"]:
        return "mean", metric, None, ()
    if statistic["max"]:
        return "max", metric, None, ()
    q = 50.0 if statistic["q"].lower() == "median" else float(statistic["q"][1:])
    if not 0.0 < q < 100.0:
        raise ConfigError(f"{line!r}: a percentile is above 0 and below 100; for all requests write max")
    return "percentile", metric, q, ()


def _check_direction(kind: Kind, metric: str, upper: bool, line: str) -> None:
    wants_upper = kind in ("percentile", "mean", "max", "count") or SHARES.get(metric) == "<="
    if upper != wants_upper:
        raise ConfigError(f"{line!r}: {metric} is gated from {'above, with <=' if wants_upper else 'below, with >='}")


def _bound(text: str, unit: Unit, line: str) -> Bound:
    lowered = text.lower()
    if "baseline" in lowered:
        return _relative(lowered, unit, line)
    return Bound(value=_quantity(text, unit, line))


def _relative(text: str, unit: Unit, line: str) -> Bound:
    if text == "baseline":
        return Bound()
    if match := re.fullmatch(rf"(?:baseline\s*[*x]\s*({_NUMBER})|({_NUMBER})\s*[*x]?\s*baseline)", text):
        return Bound(factor=float(match[1] or match[2]))
    if match := re.fullmatch(rf"({_NUMBER})\s*%\s*(?:of\s+)?baseline", text):
        return Bound(factor=float(match[1]) / 100.0)
    if match := re.fullmatch(r"baseline\s*([+-])\s*(.+)", text):
        sign = 1.0 if match[1] == "+" else -1.0
        if share := re.fullmatch(rf"({_NUMBER})\s*%", match[2]):
            return Bound(factor=1.0 + sign * float(share[1]) / 100.0)
        return Bound(offset=sign * _quantity(match[2], unit, line))
    raise ConfigError(f"{line!r}: cannot read {text!r}; write baseline + 10%, baseline + 20ms or 1.1 * baseline")


def _quantity(text: str, unit: Unit, line: str) -> float:
    text = text.strip()
    if unit == "s":
        try:
            return parse_duration(text)
        except ConfigError as error:
            raise ConfigError(f"{line!r}: {error}") from None
    pattern = {"share": rf"({_NUMBER})\s*(%?)", "count": r"([0-9]+)()", "per_s": rf"({_NUMBER})\s*(?:[a-z]*/s)?()"}[
        unit
    ]
    match = re.fullmatch(pattern, text.lower())
    if match is None:
        raise ConfigError(f"{line!r}: {text!r} is not a {'share like 95%' if unit == 'share' else 'number'}")
    value = float(match[1])
    if unit == "share":
        value = value / 100.0 if match[2] else value
        if value > 1.0:
            raise ConfigError(f"{line!r}: {text} is more than all requests; write 95% or 0.95")
    return value


def format_bound(bound: Bound, unit: Unit) -> str:
    """A bound as people write it."""
    if bound.value is not None:
        return format_value(bound.value, unit)
    text = "baseline" if bound.factor == 1.0 else f"{bound.factor:g} * baseline"
    return text + (f" {bound.offset:+g}" if bound.offset else "")


def format_value(value: float | None, unit: Unit) -> str:
    """A measured value as people write it; "undefined" for None."""
    if value is None:
        return "undefined"
    if unit == "s":
        return format_seconds(value)
    return f"{100.0 * value:.4g}%" if unit == "share" else f"{value:.6g}" + ("/s" if unit == "per_s" else "")
