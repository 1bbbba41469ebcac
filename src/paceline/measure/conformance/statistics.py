"""The pack's computed cases: numbers in, numbers out, no server needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec

from paceline.measure import stats
from paceline.measure.conformance.runs import KINDS
from paceline.measure.gates import evaluate, parse_gate
from paceline.measure.paired import sign_flip_test
from paceline.measure.records import ErrorClass, RequestRecord, Usage
from paceline.measure.slo import parse_slos
from paceline.measure.summary import Throughput, measure_run


class Computed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One computed case."""

    id: str
    title: str
    kind: str
    input: dict[str, Any]
    expect: dict[str, Any]
    why: str = ""


def load_computed() -> list[Computed]:
    """All computed cases."""
    raw = (files("paceline.measure.conformance") / "cases" / "statistics.json").read_bytes()
    return msgspec.json.decode(raw, type=list[Computed])


def differences(case: Computed) -> dict[str, tuple[Any, Any]]:
    """Keys that our statistics get wrong: (expected, got)."""
    got = _KINDS[case.kind](case.input)
    return {key: (want, got.get(key)) for key, want in case.expect.items() if not _same(want, got.get(key))}


def _same(want: Any, got: Any) -> bool:
    if isinstance(want, float | int) and isinstance(got, float | int):
        return math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(want, list) and isinstance(got, list | tuple):
        return len(want) == len(got) and all(map(_same, want, got))
    return bool(want == got)


def fifo_completions(
    arrivals: int, every_s: float, service_s: float, stall_from_s: float, stall_to_s: float
) -> list[tuple[float, float, float]]:
    """(due, begun, done) at a first-come-first-served server that stands still for a while."""
    free_at, rows = 0.0, []
    for i in range(arrivals):
        due = i * every_s
        begun = max(due, free_at)
        if stall_from_s <= begun < stall_to_s:
            begun = stall_to_s
        free_at = begun + service_s
        rows.append((due, begun, free_at))
    return rows


def _from_schedule(given: dict[str, Any]) -> dict[str, Any]:
    scale = [given[key] / 1e3 for key in ("every_ms", "service_ms", "stall_from_ms", "stall_to_ms")]
    rows = fifo_completions(given["arrivals"], *scale)
    response, service = [done - due for due, _, done in rows], [done - begun for _, begun, done in rows]

    def at(values: list[float], q: float) -> float:
        value = stats.percentile(values, q, given["method"])
        assert value is not None
        return round(1e3 * value, 6)

    found = {f"response_p{q}_ms": at(response, q) for q in (50, 90, 95, 99)}
    return {**found, "response_max_ms": round(1e3 * max(response), 6), "service_p99_ms": at(service, 99)}


def _percentile(given: dict[str, Any]) -> dict[str, Any]:
    values = [float(i) for i in range(1, given["values_to"] + 1)]
    methods: tuple[stats.Method, ...] = ("nearest-rank", "linear")
    return {method: stats.percentile(values, given["q"], method) for method in methods}


def _record(i: int, ttft_ms: float | None) -> RequestRecord:
    """A success whose first token came then; None: one that ended without a token."""
    seconds = 0.001 if ttft_ms is None else ttft_ms / 1e3
    return RequestRecord(
        id=str(i), index=i, scheduled_s=float(i), dispatched_s=float(i), written_s=float(i), closed_s=i + seconds,
        status=200, read_s=(i + seconds,), read_bytes=(1,), kinds="c" if ttft_ms is not None else "F", row_reads=(0,),
        row_chars=(1,), usage=Usage(completion_tokens=0 if ttft_ms is None else 1),
    )  # fmt: skip


def _summary(given: dict[str, Any]) -> dict[str, Any]:
    records = [_record(i, value) for i, value in enumerate(given["ttft_ms"])]
    records += [
        RequestRecord(
            id=f"f{i}", index=i, scheduled_s=100.0 + i, dispatched_s=100.0 + i, closed_s=100.001 + i, status=503,
            error=ErrorClass.REJECTED,
        )
        for i in range(given.get("failed", 0))
    ]  # fmt: skip
    run = measure_run(records, slos=parse_slos(given.get("slo", "")))
    ttft = run.latencies["ttft"]

    def ms(value: float | None) -> Any:
        return None if value is None else "inf" if math.isinf(value) else round(1e3 * value, 9)

    def at(q: float, with_failures: bool = False) -> Any:
        found = ttft.quantile(q, with_failures=with_failures)
        return None if found is None else ms(found.value)

    return {
        "n": ttft.n,
        "n_undefined": ttft.n_undefined,
        "n_failed": ttft.n_failed,
        "mean_ms": ms(ttft.mean),
        "p50_ms": at(50.0),
        "p95_ms": at(95.0),
        "p95_with_failures_ms": at(95.0, True),
        "error_rate": None if run.success_share is None else 1.0 - run.success_share,
        "goodput": run.goodput.share,
        "gate": str(evaluate(parse_gate(given["gate"]), run).status) if "gate" in given else None,
    }


def _even_stream(name: str, start_s: float, tokens: int, gap_s: float) -> RequestRecord:
    """A success of one token every `gap_s`."""
    times = tuple(start_s + gap_s * (i + 1) for i in range(tokens))
    return RequestRecord(
        id=name, index=0, scheduled_s=start_s, dispatched_s=start_s, written_s=start_s, closed_s=times[-1], status=200,
        read_s=times, read_bytes=(1,) * tokens, kinds="c" * tokens, row_reads=tuple(range(tokens)),
        row_chars=(1,) * tokens, usage=Usage(prompt_tokens=1, completion_tokens=tokens),
    )  # fmt: skip


def _plateau(given: dict[str, Any]) -> dict[str, Any]:
    gap_s, tokens = given["gap_ms"] / 1e3, given["tokens"]
    records = [
        _even_stream(f"{slot}.{turn}", turn * gap_s * tokens, tokens, gap_s)
        for slot in range(given["slots"])
        for turn in range(given["rounds"])
    ]
    records.append(_even_stream("straggler", 0.0, given["straggler_tokens"], gap_s))
    run = measure_run(records, concurrency=given["slots"] + 1, open_loop=False)

    def per_s(span: Throughput | None) -> float | None:
        return None if span is None or span.output_tokens.per_s is None else round(span.output_tokens.per_s, 6)

    return {"whole_tokens_per_s": per_s(run.whole), "plateau_tokens_per_s": per_s(run.plateau)}


def _input_tokens(given: dict[str, Any]) -> dict[str, Any]:
    records = [
        msgspec.structs.replace(_record(i, 100.0), turn=i, usage=Usage(prompt_tokens=count, completion_tokens=1))
        for i, count in enumerate(given["prompt_tokens"])
    ]
    run = measure_run(records)
    return {"input_tokens": None if run.whole is None else run.whole.input_tokens.known}


_KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **KINDS,
    "latencies_from_schedule": _from_schedule,
    "percentile": _percentile,
    "summary": _summary,
    "plateau": _plateau,
    "input_tokens": _input_tokens,
    "smallest_n": lambda given: {"n": [stats.smallest_n(q) for q in given["q"]]},
    "rank_interval": lambda given: {"ranks": [stats.rank_interval(n, given["q"]) for n in given["n"]]},
    "sign_flip": lambda given: {"p": [sign_flip_test([0.1] * n) for n in given["pairs"]]},
}
