"""Writes the report of a folder: a run, a sweep, a comparison or a capacity search, whichever it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure import capacity, duel, sweep
from paceline.measure.analysis import Analysis, analyse
from paceline.measure.compare import Comparison
from paceline.measure.folder import MANIFEST, RunFolder, write_atomically
from paceline.measure.report import comparepage, runpage, sweeppage
from paceline.measure.report.data import plain, summary, to_csv, to_json, to_junit
from paceline.measure.verdict import Outcome


@dataclass(frozen=True, slots=True)
class Written:
    """What a report left on disk, and the exit code that belongs to it."""

    files: tuple[Path, ...]
    exit_code: int
    headline: str


def write_report(
    path: str | Path,
    out: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    gates: Sequence[str] | None = None,
    slos: Sequence[str] | None = None,
    price_per_hour: float | None = None,
    undecided_fails: bool = False,
) -> Written:
    """Write the report of what `path` holds into `out` (None: beside it). Raises ConfigError for a folder of nothing.

    A run gives report.html, summary.json, requests.csv and junit.xml; the others report.html and summary.json.
    `gates`, `slos` and the price replace those of a run's plan.
    """
    folder = Path(path)
    target = folder if out is None else Path(out)
    if (folder / MANIFEST).exists():
        reference = None if baseline is None else RunFolder(baseline)
        found = analyse(RunFolder(folder), baseline=reference, gates=gates, slos=slos, price_per_hour=price_per_hour)
        return write_run(found, target, undecided_fails=undecided_fails)
    if (folder / sweep.INDEX).exists():
        return write_sweep(folder, target)
    if (folder / duel.INDEX).exists():
        return write_comparison(duel.read_duel(folder), target)
    if (folder / capacity.INDEX).exists():
        return write_capacity(folder, target)
    raise ConfigError(f"{folder} holds no run, sweep, comparison or capacity search")


def write_run(analysis: Analysis, target: Path, *, undecided_fails: bool = False) -> Written:
    """All four files of one run."""
    verdict = analysis.verdict
    files = {
        "report.html": runpage.render(analysis).encode(),
        "summary.json": run_json(analysis),
        "requests.csv": to_csv(analysis.run.requests).encode(),
        "junit.xml": to_junit(analysis, undecided_fails=undecided_fails).encode(),
    }
    return Written(_write(target, files), verdict.exit_code, f"{verdict.outcome.value}: {verdict.headline}")


def write_sweep(folder: Path, target: Path) -> Written:
    axis, points = sweep.read_sweep(folder)
    if not points:
        raise ConfigError(f"{folder} is a sweep without a single point")
    rows = [sweeppage.Row(point.value, point.analysis, point.folder.path.name) for point in points]
    files = {"report.html": sweeppage.render(axis, rows).encode(), "summary.json": sweep_json(axis, points)}
    outcomes = [row.analysis.verdict.outcome for row in rows]
    # A sweep goes into overload on purpose: it is only as broken as its points are invalid.
    code = 3 if all(outcome is Outcome.INVALID for outcome in outcomes) else 0
    return Written(_write(target, files), code, f"{len(rows)} points over {axis}")


def sweep_json(axis: str, points: Sequence[sweep.Point]) -> bytes:
    """What summary.json of a sweep holds."""
    rows = [{"value": p.value, "folder": p.folder.path.name, **_brief(p.analysis)} for p in points]
    return to_json({"schema": 1, "axis": axis, "points": rows})


def comparison_json(comparison: Comparison) -> bytes:
    return to_json({"schema": 1, **plain(comparison), "exit_code": comparison.exit_code})


def capacity_json(found: capacity.Capacity) -> bytes:
    return to_json({"schema": 1, **plain(found)})


def run_json(analysis: Analysis) -> bytes:
    return to_json(summary(analysis))


def _brief(analysis: Analysis) -> dict[str, Any]:
    full = summary(analysis)
    return {key: full[key] for key in ("verdict", "gates", "metrics", "crosscheck", "cost")}


def write_comparison(comparison: Comparison, target: Path) -> Written:
    """Report of repeated pairs, or of two saved runs."""
    files = {"report.html": comparepage.render(comparison).encode(), "summary.json": comparison_json(comparison)}
    return Written(_write(target, files), comparison.exit_code, f"{comparison.verdict}: {comparison.why}")


def write_capacity(folder: Path, target: Path) -> Written:
    """Report of a search: its answer, and its trials as a sweep."""
    try:
        found = msgspec.json.decode((folder / capacity.INDEX).read_bytes(), type=capacity.Capacity)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder / capacity.INDEX} cannot be read: {error}") from None
    rows = [
        sweeppage.Row(
            trial.rate, analyse(RunFolder(folder / trial.folder)), trial.folder, f"{trial.answer}: {trial.why}"
        )
        for trial in sorted(found.trials, key=lambda trial: (trial.rate, trial.attempt))
        if trial.folder and (folder / trial.folder / MANIFEST).exists()
    ]
    headline = found.shown
    files = {
        "report.html": sweeppage.render("rate", rows, capacity=(headline, found.why)).encode(),
        "summary.json": capacity_json(found),
    }
    return Written(_write(target, files), 0 if found.best is not None else 1, f"capacity {headline}: {found.why}")


def _write(target: Path, files: dict[str, bytes]) -> tuple[Path, ...]:
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(target / name, content)
    except OSError as error:
        raise ConfigError(f"{target}: the report cannot be written: {error.strerror or error}") from None
    return tuple(target / name for name in files)
