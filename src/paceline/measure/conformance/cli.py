"""`paceline bench conformance`: our own client, a server for other clients, and the check of what they report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.conformance.check import TOLERANCE_MS, CaseResult, compare
from paceline.measure.conformance.load import load_load_cases
from paceline.measure.conformance.script import Case, choose, load_cases
from paceline.measure.conformance.server import ConformanceApi
from paceline.measure.conformance.statistics import differences, load_computed


def list_cases() -> list[str]:
    """One line for each case."""
    rows = [f"{case.id:6} {case.group:8} {case.title}" for case in load_cases()]
    rows += [f"{case.id:6} {'load':8} {case.title}" for case in load_load_cases()]
    return rows + [f"{case.id:6} {'numbers':8} {case.title}" for case in load_computed()]


def run_own(ids: Sequence[str] = (), *, tolerance_ms: float = TOLERANCE_MS) -> tuple[list[CaseResult], list[str]]:
    """Play the pack to our own client; results of streams, and lines about computed and load cases that are wrong.

    `ids` empty: all streams and computed cases. Load cases, half a minute of real load, run when they are named, or all
    of them by the name "load".
    """
    from paceline.measure.conformance.load import run_load_cases
    from paceline.measure.conformance.pack import run_pack

    wanted = {name.lower() for name in ids}
    computed = [case for case in load_computed() if not ids or case.id.lower() in wanted]
    loads = [case for case in load_load_cases() if case.id.lower() in wanted or "load" in wanted]
    known = {case.id.lower() for case in computed} | {case.id.lower() for case in loads} | {"load"}
    streamed = [name for name in ids if name.lower() not in known]
    results = asyncio.run(run_pack(choose(streamed), tolerance_ms)) if streamed or not ids else []
    wrong = [
        f"{case.id} {key}: expected {want}, got {got}"
        for case in computed
        for key, (want, got) in differences(case).items()
    ]
    return results, wrong + (run_load_cases(loads) if loads else [])


def check_reports(path: Path, *, tolerance_ms: float = TOLERANCE_MS) -> list[CaseResult]:
    """Judge another client's reports: a JSON object of case id to what it reported. Raises ConfigError."""
    try:
        reports = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a JSON object of case ids and reports: {error}") from None
    return [
        compare(case, reports[name], tolerance_ms) for name, case in zip(reports, choose(list(reports)), strict=True)
    ]


def render(results: Sequence[CaseResult], wrong: Sequence[str] = ()) -> list[str]:
    """Lines for the terminal: what is wrong in detail, then the count."""
    lines: list[str] = []
    for result in results:
        if not result.passed:
            lines.append(f"FAIL {result.case.id}  {result.case.title}")
            lines += [f"     {d.key}: expected {_short(d.expected)}, got {_short(d.got)}" for d in result.differences]
            lines.append(f"     {result.case.why}")
        if result.missing:
            lines.append(f"     {result.case.id} does not report {', '.join(result.missing)}")
    lines += [f"FAIL {line}" for line in wrong]
    right = sum(result.passed for result in results)
    if results:
        worst = max(result.worst_ms for result in results)
        lines.append(f"{right} of {len(results)} streams right, largest time error {worst:.1f} ms")
    if wrong:
        lines.append(f"{len({line.split()[0] for line in wrong})} computed or load cases wrong")
    return lines or ["all right"]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_short(entry) for entry in value[:12]) + (", …]" if len(value) > 12 else "]")
    if isinstance(value, float):
        return f"{value:.1f}"
    text = "undefined" if value is None else str(value)
    return text if len(text) < 60 else text[:57] + "..."


def export(folder: Path) -> list[Path]:
    """Write the pack's JSON files, as they are shipped, into a folder."""
    from importlib.resources import files

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for entry in sorted((files("paceline.measure.conformance") / "cases").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            target = folder / entry.name
            target.write_bytes(entry.read_bytes())
            written.append(target)
    return written


async def serve(port: int) -> None:
    """Serve the pack until cancelled; the address is printed first."""
    from paceline.measure.mock import MockServer

    async with MockServer(ConformanceApi(), port=port) as server:
        print(f"conformance pack at {server.url}; GET {server.url}/cases", flush=True)
        await asyncio.Event().wait()


def as_json(results: Sequence[CaseResult], wrong: Sequence[str]) -> bytes:
    """Machine-readable results."""
    rows = [_row(result.case, result) for result in results]
    return msgspec.json.format(msgspec.json.encode({"streams": rows, "computed_wrong": list(wrong)}), indent=2)


def _row(case: Case, result: CaseResult) -> dict[str, Any]:
    return {
        "id": case.id,
        "group": case.group,
        "passed": result.passed,
        "differences": [{"key": d.key, "expected": d.expected, "got": d.got} for d in result.differences],
        "missing": list(result.missing),
        "worst_ms": result.worst_ms,
    }
