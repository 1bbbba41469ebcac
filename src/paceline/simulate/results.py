"""A simulation as a run folder, so that every metric, gate, report and comparison of `paceline bench` reads it."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.measure.folder import SCHEDULE, RowWriter, RunFolder, refuse_taken
from paceline.measure.plan import BenchPlan
from paceline.measure.provenance import client_facts, command_line
from paceline.measure.records import Manifest, Segment
from paceline.measure.schedule import Arrival, digest, encode
from paceline.simulate.drive import Simulated


def write_run(
    path: str | Path,
    simulated: Simulated,
    plan: BenchPlan,
    *,
    target: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
    schedule: list[Arrival] | None = None,
    labels: Mapping[str, str] | None = None,
    parent: str | None = None,
) -> RunFolder:
    """Write the rows of a simulation into a new folder. Raises ConfigError for one that holds a run already.

    `target` says what was simulated (model, chip, engine ...); `engine` more of its insides, beside the usage.
    """
    folder = Path(path)
    refuse_taken(folder)
    now = datetime.datetime.now(datetime.UTC)
    rows = encode(schedule or [])
    manifest = Manifest(
        run_id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        kind="simulated",
        created=now.isoformat(timespec="seconds"),
        plan=plan.to_dict(),
        seed=plan.seed,
        command=command_line(),
        requests_planned=len(simulated.records) if schedule is None else sum(each.turns for each in schedule),
        conversations_planned=sum(each.turns > 1 for each in schedule or ()),
        duration_planned_s=plan.load.duration_s,
        schedule_sha256=digest(rows),
        target={"engine": "paceline, simulated", **target},
        client=client_facts({}),
        segments=[
            Segment(
                index=0,
                t0_ns=0,
                t0_wall=now.isoformat(timespec="milliseconds"),
                ended=simulated.ended,
                ended_s=simulated.ended_s,
            )
        ],
        warnings=list(simulated.warnings),
        parent=parent,
        labels=dict(labels or {}),
        engine={**(engine or {}), **engine_facts(simulated)},
    )
    made = RunFolder.create(folder, manifest)
    if schedule:
        (folder / SCHEDULE).write_bytes(rows)
    _write_rows(made.records_path(0), simulated.records)
    _write_rows(made.server_path, simulated.scrapes)
    return made


def engine_facts(simulated: Simulated) -> dict[str, Any]:
    """What the engines' time went into, as plain values."""
    return {
        "usage": {
            name: {**msgspec.to_builtins(report), "utilisation": report.utilisation}
            for name, report in simulated.usage.items()
        },
        "steps": simulated.steps,
    }


def _write_rows(path: Path, rows: list[Any]) -> None:
    writer = RowWriter(path)
    try:
        for row in rows:
            writer.write(row)
    finally:
        writer.close()
