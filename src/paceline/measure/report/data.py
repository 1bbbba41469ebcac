"""The analysis for machines: summary JSON, records as CSV, gates as JUnit XML."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any
from xml.sax.saxutils import quoteattr

import msgspec

from paceline.measure.analysis import Analysis
from paceline.measure.gates import Status
from paceline.measure.metrics import RequestMetrics
from paceline.measure.records import RequestRecord
from paceline.measure.stats import percentile
from paceline.measure.verdict import Level, Outcome, client_lateness

SCHEMA = 1


def plain(value: Any) -> Any:
    """Dataclasses and structs as JSON values. Undefined is null; infinity, which JSON lacks, is the string "inf"."""
    if isinstance(value, RequestRecord | RequestMetrics):
        raise TypeError("single requests belong into the CSV")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else "inf" if value > 0 else None if math.isnan(value) else "-inf"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hidden = ("requests", "judged")
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in hidden}
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.to_builtins(value))
    if isinstance(value, dict):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def summary(analysis: Analysis) -> dict[str, Any]:
    """Everything but the single requests. Seconds, tokens and shares; see docs/measuring.md."""
    run = analysis.run
    lateness = client_lateness(analysis.records)
    lags = [lag for sample in analysis.samples for lag in sample.lags_s]
    return {
        "schema": SCHEMA,
        "verdict": {
            "outcome": analysis.verdict.outcome.value,
            "exit_code": analysis.verdict.exit_code,
            "headline": analysis.verdict.headline,
            "reasons": plain(analysis.verdict.reasons),
        },
        "gates": [
            {
                "gate": result.gate.text,
                "status": result.status.value,
                "why": result.why,
                **{name: plain(getattr(result, name)) for name in ("value", "bound", "low", "high", "n", "violations")},
            }
            for result in analysis.verdict.gates
        ],
        "baseline": analysis.baseline,
        "metrics": {**plain(run), "sent": len(run.requests)},
        "crosscheck": {**plain(analysis.crosscheck), "agrees": analysis.crosscheck.agrees},
        "cost": plain(analysis.cost),
        "client": {
            "late_p50_s": plain(percentile(lateness, 50.0)),
            "late_p99_s": plain(percentile(lateness, 99.0)),
            "late_max_s": plain(max(lateness, default=None)),
            "loop_lag_p99_s": plain(percentile(lags, 99.0)),
        },
        "manifest": plain(analysis.manifest),
    }


def to_json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


_COLUMNS = (
    "id", "index", "turn", "worker", "segment", "traffic_class", "tenant", "scheduled_s", "dispatched_s", "cap_wait_s",
    "written_s", "headers_s", "closed_s", "status", "error", "finish_reason", "prompt_tokens_wanted",
    "output_tokens_wanted", "first_wave",
)  # fmt: skip
_DERIVED = (
    "queue_delay_s", "ttft_s", "ttft_service_s", "first_visible_s", "tpot_s", "e2e_s", "e2e_service_s", "close_s",
    "max_stall_s", "input_tokens", "cached_tokens", "output_tokens",
)  # fmt: skip


def to_csv(requests: Sequence[RequestMetrics]) -> str:
    """One line for each request; an empty cell is undefined. Times in seconds from the start of the schedule."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *_DERIVED, "token_source", "events", "attempts"])
    for request in requests:
        record = request.record
        row = [_cell(getattr(record, name)) for name in _COLUMNS]
        row += [_cell(getattr(request, name)) for name in _DERIVED]
        writer.writerow([*row, request.token_source.value, len(record.token_rows()), len(record.attempts) + 1])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return value.value if isinstance(value, Enum) else f"{value:.7g}" if isinstance(value, float) else value


def to_junit(analysis: Analysis, *, undecided_fails: bool = False) -> str:
    """One test case for each gate, and one for the validity of the run.

    INVALID is an error of every case; DEGRADED and UNDECIDED are skipped, or failures where the caller says so.
    """
    verdict = analysis.verdict
    cases: list[str] = []
    failures = errors = skipped = 0
    invalid = verdict.outcome is Outcome.INVALID
    doubts = [reason.text for reason in verdict.reasons if reason.level in (Level.INVALID, Level.DEGRADED, Level.FAIL)]
    results: list[tuple[str, str, str]] = []  # (name, kind of outcome, message)
    if invalid:
        results.append(("run is valid", "error", "; ".join(doubts)))
    elif doubts:
        fatal = any(reason.level is Level.FAIL for reason in verdict.reasons)
        results.append(("run is valid", "failure" if fatal else "doubt", "; ".join(doubts)))
    else:
        results.append(("run is valid", "", ""))
    for result in verdict.gates:
        kind = {Status.PASS: "", Status.FAIL: "failure"}.get(result.status, "doubt")
        message = f"{result.value_text} against {result.bound_text}: {result.why}"
        results.append((result.gate.text, "error" if invalid else kind, "the run is INVALID" if invalid else message))
    for name, kind, message in results:
        kind = ("failure" if undecided_fails else "skipped") if kind == "doubt" else kind
        errors += kind == "error"
        failures += kind == "failure"
        skipped += kind == "skipped"
        inner = f"<{kind} message={quoteattr(message)}/>" if kind else ""
        cases.append(f'    <testcase classname="paceline.bench" name={quoteattr(name)}>{inner}</testcase>')
    name = analysis.plan.name or analysis.manifest.run_id
    seconds = analysis.run.whole.span.seconds if analysis.run.whole else 0.0
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n'
        f'  <testsuite name={quoteattr(name)} tests="{len(results)}" failures="{failures}" errors="{errors}" '
        f'skipped="{skipped}" time="{seconds:.3f}">\n' + "\n".join(cases) + "\n  </testsuite>\n</testsuites>\n"
    )
