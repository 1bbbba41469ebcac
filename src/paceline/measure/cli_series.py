"""`paceline bench sweep`, `capacity` and `compare`: the commands that run many runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.measure.cli_base import COULD_NOT_RUN, Report, Url, console_for, out_folder, put_json, view_for
from paceline.measure.options import BenchOptions, to_plan, usage_error

if TYPE_CHECKING:
    from paceline.measure.capacity import Capacity


def sweep_command(
    url: Url,
    rates: Annotated[str | None, typer.Option(help="Rates: 1,2,4,8.", show_default=False)] = None,
    concurrencies: Annotated[str | None, typer.Option(help="Concurrencies: 1,8,64.", show_default=False)] = None,
    report: Report = True,
    *,
    options: BenchOptions,
) -> None:
    """The same load at several rates or concurrencies."""
    from paceline.measure.console import print_sweep
    from paceline.measure.report.write import sweep_json, write_sweep
    from paceline.measure.sweep import Point, run_sweep

    if (rates is None) == (concurrencies is None):
        raise usage_error("give --rates or --concurrencies")
    axis = "rate" if rates is not None else "concurrency"
    values = _numbers(rates or concurrencies or "", f"--{axis}s")
    plan = to_plan(url, options, needs_load=False)
    out = out_folder(options, "sweep")
    with view_for(f"sweep {plan.target.url}", options.quiet) as view:

        def show(point: Point) -> None:
            outcome = point.analysis.verdict.outcome.value
            view.note(f"{axis} {point.value:g}: {outcome}  {point.analysis.verdict.headline}")

        points = run_sweep(plan, axis, values, out, view, show)
    console = console_for(err=options.as_json)
    if options.as_json:
        put_json(sweep_json(axis, points))
    else:
        print_sweep(console, axis, points)
    if report:
        write_sweep(out, out)
    console.print(f"result: {out}", highlight=False, markup=False, soft_wrap=True)
    # A sweep goes into overload on purpose: it is only as broken as its points are invalid.
    raise typer.Exit(min(point.analysis.verdict.exit_code for point in points) // COULD_NOT_RUN * COULD_NOT_RUN)


def _numbers(text: str, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise usage_error("numbers separated by commas", option) from None
    if not values:
        raise usage_error("at least one number", option)
    return values


def capacity_command(
    url: Url,
    low: Annotated[float, typer.Option(help="Rate to begin with; if it does not hold, the answer is none.")] = 0.5,
    high: Annotated[float, typer.Option(help="Rate to stop at.")] = 1000.0,
    resolution: Annotated[float, typer.Option(help="Relative width at which the search ends.")] = 0.05,
    attempts: Annotated[int, typer.Option(help="Runs at one rate that cannot tell before it counts as failed.")] = 3,
    confirmations: Annotated[int, typer.Option(help="Fresh runs at the answer.")] = 1,
    report: Report = True,
    attainment: Annotated[str, typer.Option(help="With --slo and no --gate: share that must meet them.")] = "95%",
    *,
    options: BenchOptions,
) -> None:
    """The highest rate inside the promise; 0 when one was found, 1 when none holds."""
    from paceline.measure.capacity import Answer, SearchSettings, run_capacity

    if not options.gate:
        if not options.slo:
            raise usage_error("capacity needs a promise to keep: give at least one --gate or --slo")
        options = _with_gate(options, f"goodput >= {attainment}")
    plan = to_plan(url, options, needs_load=False)
    settings = SearchSettings(low, high, resolution, attempts, confirmations)
    out = out_folder(options, "capacity")
    with view_for(f"capacity {plan.target.url}", options.quiet) as view:

        def show(rate: float, attempt: int, answer: Answer, why: str) -> None:
            view.note(f"{rate:g}/s, run {attempt}: {answer.value}  {why}")

        found = run_capacity(plan, out, settings, view, show)
    tell_capacity(found, out, as_json=options.as_json, report=report)


def tell_capacity(found: Capacity, out: Path, *, as_json: bool, report: bool) -> NoReturn:
    """Print what a search found, write its page, and exit with what it comes to."""
    from paceline.measure.console import print_capacity
    from paceline.measure.report.write import capacity_json, write_capacity

    console = console_for(err=as_json)
    if as_json:
        put_json(capacity_json(found))
    else:
        print_capacity(console, found)
    if report:
        write_capacity(out, out)
    console.print(f"result: {out}", highlight=False, markup=False, soft_wrap=True)
    if found.best is not None:
        raise typer.Exit(0 if found.limited_by in ("server", "range") else 2)
    raise typer.Exit(3 if found.limited_by in ("client", "user") else 1)


def _with_gate(options: BenchOptions, gate: str) -> BenchOptions:
    return dataclasses.replace(options, gate=[gate])


def compare_command(
    a: Annotated[str, typer.Argument(help="URL of A, or the folder of a saved run.", show_default=False)],
    b: Annotated[str, typer.Argument(help="URL of B, or the folder of a saved run.", show_default=False)],
    pairs: Annotated[int, typer.Option(help="Pairs of runs, in the order AB BA AB ...")] = 6,
    aa_pairs: Annotated[int, typer.Option(help="Pairs of one arm with itself: the noise floor.")] = 2,
    cache: Annotated[str, typer.Option(help="cold: texts the server has not seen; primed: sent once before.")] = "cold",
    smallest_effect: Annotated[float, typer.Option(help="The smallest change that matters, e.g. 0.03.")] = 0.03,
    b_extra: Annotated[str | None, typer.Option(help="Request fields of B alone, as a JSON object.")] = None,
    report: Report = True,
    *,
    options: BenchOptions,
) -> None:
    """Is B faster than A? Exit code 0: not slower, 1: slower, 2: undecided."""
    from paceline.measure.console import print_comparison
    from paceline.measure.report.write import comparison_json, write_comparison

    saved = [Path(side).is_dir() for side in (a, b)]
    if any(saved) and not all(saved):
        raise usage_error("compare two URLs or two folders, not one of each")
    if all(saved):
        comparison, out = _compare_saved(Path(a), Path(b), smallest_effect), options.out
    else:
        out = out_folder(options, "compare")
        comparison = _compare_live(a, b, b_extra, options, out, pairs, aa_pairs, cache, smallest_effect)
    console = console_for(err=options.as_json)
    if options.as_json:
        put_json(comparison_json(comparison))
    else:
        print_comparison(console, comparison)
    if report and out is not None:
        write_comparison(comparison, out)
        console.print(f"result: {out}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(comparison.exit_code)


def _compare_saved(a: Path, b: Path, smallest_effect: float) -> Any:
    from paceline.measure.analysis import run_metrics
    from paceline.measure.compare import compare_saved
    from paceline.measure.duel import INDEX, read_duel
    from paceline.measure.folder import RunFolder

    if a == b and (a / INDEX).exists():
        return read_duel(a)
    folders = RunFolder(a), RunFolder(b)
    caches = {folder.manifest.labels.get("cache", "unknown") for folder in folders}
    return compare_saved(
        run_metrics(folders[0]),
        run_metrics(folders[1]),
        smallest_effect=smallest_effect,
        cache=caches.pop() if len(caches) == 1 else "unknown",
        name_a=a.name,
        name_b=b.name,
    )


def _compare_live(
    a: str,
    b: str,
    b_extra: str | None,
    options: BenchOptions,
    out: Path,
    pairs: int,
    aa_pairs: int,
    cache: str,
    smallest_effect: float,
) -> Any:
    from paceline.measure.compare import Cell
    from paceline.measure.duel import run_duel
    from paceline.measure.folder import RunFolder
    from paceline.measure.verdict import Outcome

    plan_a = to_plan(a, options)
    plan_b = to_plan(b, options if b_extra is None else dataclasses.replace(options, extra=b_extra))
    with view_for("compare", options.quiet) as view:

        def show(cell: Cell, folder: RunFolder, outcome: Outcome) -> None:
            view.note(f"{cell.name}: {outcome.value}")

        return run_duel(
            (plan_a, plan_b),
            out,
            pairs=pairs,
            aa_pairs=aa_pairs,
            cache=cache,
            smallest_effect=smallest_effect,
            on_progress=view,
            on_cell=show,
        )
