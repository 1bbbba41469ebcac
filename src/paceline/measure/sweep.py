"""The same load at several rates or concurrencies: one run a point, one folder a point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.measure.analysis import Analysis, analyse
from paceline.measure.folder import RunFolder, write_atomically
from paceline.measure.plan import Arrivals, BenchPlan, check
from paceline.measure.records import SelfCheck
from paceline.measure.runner import Extras, OnProgress, run

INDEX = "sweep.json"
AXES = ("rate", "concurrency")


class SweepIndex(msgspec.Struct, kw_only=True):
    """What sweep.json holds: enough to find the points again."""

    axis: str
    points: list[tuple[float, str]]  # value on the axis, folder beside this file
    complete: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep."""

    value: float
    folder: RunFolder
    analysis: Analysis


def at_load(plan: BenchPlan, axis: str, value: float, salt: str) -> BenchPlan:
    """The plan at one rate or concurrency, with prompts of its own: a cache warmed by other points knows none."""
    if axis == "rate":
        load = msgspec.structs.replace(plan.load, rate=value, concurrency=None)
        if load.arrivals is Arrivals.CLOSED:
            load = msgspec.structs.replace(load, arrivals=Arrivals.POISSON)
    else:
        if value != int(value):
            raise ConfigError(f"a concurrency is a whole number, not {value:g}")
        load = msgspec.structs.replace(
            plan.load, arrivals=Arrivals.CLOSED, rate=None, max_concurrency=None, concurrency=int(value)
        )
    prompts = msgspec.structs.replace(plan.prompts, salt=f"{plan.prompts.salt}{salt}")
    return msgspec.structs.replace(plan, load=load, prompts=prompts)


def run_sweep(
    plan: BenchPlan,
    axis: str,
    values: Sequence[float],
    out_dir: Path,
    on_progress: OnProgress | None = None,
    on_point: Callable[[Point], None] | None = None,
) -> list[Point]:
    """Measure every point, lowest load first. Raises as `run` does; points measured before stay readable.

    The client's self-check is made once, at the highest load, and stands for all points. A run that is interrupted
    ends the sweep with the points so far.
    """
    ordered = sorted(set(values))
    if not ordered:
        raise ConfigError("a sweep needs at least one rate or concurrency")
    plans = [at_load(plan, axis, value, f":{axis}={value:g}") for value in ordered]
    for each in plans:
        check(each)
    if (out_dir / INDEX).exists():
        raise ConfigError(f"{out_dir} already holds a sweep; choose another folder")
    checked = _check_once(plans[-1])
    points: list[Point] = []
    index = SweepIndex(axis=axis, points=[])
    for number, (value, each) in enumerate(zip(ordered, plans, strict=True)):
        name = f"point-{number:02d}-{axis}-{value:g}"
        extras = Extras(labels={"sweep": axis, "point": f"{value:g}"}, parent=out_dir.name, self_check=checked)
        folder = run(each, out_dir / name, on_progress, extras)
        point = Point(value=value, folder=folder, analysis=analyse(folder))
        points.append(point)
        index.points.append((value, name))
        write_atomically(out_dir / INDEX, msgspec.json.encode(index))
        if on_point is not None:
            on_point(point)
        if not folder.manifest.complete:
            return points
    index.complete = True
    write_atomically(out_dir / INDEX, msgspec.json.encode(index))
    return points


def _check_once(plan: BenchPlan) -> SelfCheck | None:
    import asyncio

    from paceline.measure.calibrate import self_check

    return asyncio.run(self_check(plan)) if plan.client.self_check else None


def read_sweep(path: Path) -> tuple[str, list[Point]]:
    """(axis, points) of a sweep on disk. Raises ConfigError when it is none."""
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=SweepIndex)
    except (OSError, msgspec.DecodeError):
        raise ConfigError(f"{path} is no sweep: it has no readable {INDEX}") from None
    points = []
    for value, name in index.points:
        folder = RunFolder(path / name)
        points.append(Point(value=value, folder=folder, analysis=analyse(folder)))
    return index.axis, points
