"""What a client reports for a case against what is right.

Keys of `expect` and of a client's report, all optional in a report: success, error, output_tokens, input_tokens,
cached_tokens, token_events, rejected_attempts, text, finish_reason, and in milliseconds ttft_ms, first_visible_ms,
tpot_ms, e2e_ms (to the last token), close_ms, max_stall_ms, icl_ms (gaps between token-carrying events) and itl_ms
(gaps per token, see metrics.ITL_RULE). `null` is a value: undefined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.measure.conformance.script import Case
from paceline.measure.metrics import RequestMetrics

TOLERANCE_MS = 10.0


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that is wrong. `got` is None for undefined, "missing" where the client reports nothing."""

    key: str
    expected: Any
    got: Any


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    differences: tuple[Difference, ...]
    missing: tuple[str, ...] = ()  # keys that the client does not report
    worst_ms: float = 0.0  # the largest time error among the keys that agree
    observed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def only_times_differ(self) -> bool:
        """Wrong by nothing but the clock: on a busy machine worth another try."""
        return bool(self.differences) and all(
            d.key.endswith("_ms") and _time_error(d.expected, d.got) is not None for d in self.differences
        )


def observe(request: RequestMetrics) -> dict[str, Any]:
    """Our own client's report."""
    record = request.record
    return {
        "success": request.ok,
        "error": None if record.error is None else str(record.error),
        "output_tokens": request.output_tokens,
        "input_tokens": request.input_tokens,
        "cached_tokens": request.cached_tokens,
        "token_events": len(record.token_rows()),
        "rejected_attempts": len(record.attempts),
        "text": record.text,
        "finish_reason": record.finish_reason,
        "ttft_ms": _ms(request.ttft_s),
        "first_visible_ms": _ms(request.first_visible_s),
        "tpot_ms": _ms(request.tpot_s),
        "e2e_ms": _ms(request.e2e_s),
        "close_ms": _close_ms(request),
        "max_stall_ms": _ms(request.max_stall_s),
        "icl_ms": [1e3 * gap for gap in request.icl_s],
        "itl_ms": [1e3 * gap for gap in request.itl_s],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _close_ms(request: RequestMetrics) -> float | None:
    """Also of a failed request, which has no latency but has an end."""
    record = request.record
    return None if record.closed_s is None else 1e3 * (record.closed_s - record.scheduled_s)


def compare(case: Case, report: Mapping[str, Any], tolerance_ms: float = TOLERANCE_MS) -> CaseResult:
    """Hold a client's report against the case. Keys that a client does not report are listed, not judged."""
    differences: list[Difference] = []
    missing: list[str] = []
    worst = 0.0
    for key, expected in case.expect.items():
        if key not in report:
            missing.append(key)
            continue
        got = report[key]
        error = _time_error(expected, got) if key.endswith("_ms") else (0.0 if got == expected else None)
        if error is None or error > tolerance_ms:
            differences.append(Difference(key, expected, got))
        else:
            worst = max(worst, error)
    return CaseResult(case, tuple(differences), tuple(missing), worst, dict(report))


def _time_error(expected: Any, got: Any) -> float | None:
    """Largest difference in milliseconds; None where one side is undefined or the lengths differ."""
    if expected is None or got is None:
        return 0.0 if expected is got else None
    if isinstance(expected, Sequence):
        if not isinstance(got, Sequence) or len(got) != len(expected):
            return None
        return max((abs(float(a) - float(b)) for a, b in zip(expected, got, strict=True)), default=0.0)
    return abs(float(got) - float(expected))
