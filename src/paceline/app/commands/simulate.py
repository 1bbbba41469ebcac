"""`paceline simulate`: what an engine that you may not have would do under a load.

    paceline simulate llama-3-8b --chip h100 --rate 8 --duration 5min
    paceline simulate llama-3-8b --chip h100 --trace azure.csv --compare policy=slo,decode_first
    paceline simulate llama-3-8b --chip h100 --replicas 4 --router prefix_aware --trace mooncake.jsonl
    paceline simulate capacity llama-3-8b --chip h100 --slo "ttft<=1s, itl_p99<=50ms"

Exit codes of a run are those of `paceline bench`: 0 PASS, 1 FAIL, 2 UNDECIDED or DEGRADED, 3 INVALID.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings
from paceline.app.simulating import LOAD_OPTIONS, EngineOptions, FleetOptions, fleet_of, notes_of, plan_of, setup_of
from paceline.errors import ConfigError
from paceline.measure.cli_base import BenchGroup, Report, console_for, out_folder, put_json, view_for
from paceline.measure.options import BenchOptions, takes, usage_error

if TYPE_CHECKING:
    from rich.console import Console

group = typer.Typer(
    name="simulate",
    cls=BenchGroup,
    help="Simulate engines under a load: the real scheduler on a virtual clock.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ModelWord = Annotated[str | None, typer.Argument(metavar="MODEL", help="Short for --model.", show_default=False)]


def register(app: typer.Typer) -> None:
    app.add_typer(group)


def _named(engine: EngineOptions, word: str | None) -> EngineOptions:
    if word is None:
        return engine
    if engine.model is not None:
        raise ConfigError(f"the model is given twice: {word} and --model {engine.model}")
    return dataclasses.replace(engine, model=word)


@group.command("run")
@with_settings("scheduler", "kv")
@takes(EngineOptions, "engine")
@takes(FleetOptions, "fleet")
@takes(BenchOptions, "load", LOAD_OPTIONS)
def run_command(
    resolved: Resolved,
    engine: EngineOptions,
    fleet: FleetOptions,
    load: BenchOptions,
    word: ModelWord = None,
    compare: Annotated[
        str | None, typer.Option(help="policy=NAME,NAME,...: the same load under each.", show_default=False)
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="With --compare: rates, or speeds of a trace: 1,2,4.", show_default=False)
    ] = None,
    report: Report = True,
) -> None:
    """One run: state a load by --rate, --concurrency or --trace. The report is that of `paceline bench`."""
    from paceline.measure.analysis import analyse
    from paceline.measure.console import print_analysis
    from paceline.measure.report.write import run_json, write_run
    from paceline.simulate.many import simulator_of
    from paceline.simulate.run import simulate

    setup = setup_of(_named(engine, word), resolved.settings.scheduler, resolved.settings.kv)
    many = fleet_of(fleet, setup)
    simulator = simulator_of(many)
    if compare is not None:
        if simulator is not None:
            raise usage_error("policies are compared on one engine", "--compare")
        raise typer.Exit(_compare(compare, rates, load, setup, report=report))
    if rates is not None:
        raise usage_error("several rates need --compare", "--rates")
    plan = plan_of(load, setup, many)
    with view_for(f"simulate {setup.target['model']}", load.quiet) as view:
        folder, result = simulate(plan, setup, out_folder(load, "simulation"), view, simulator=simulator)
    analysis = analyse(folder)
    console = console_for(err=load.as_json)
    if load.as_json:
        put_json(run_json(analysis))
    else:
        print_analysis(console, analysis)
    if report:
        write_run(analysis, folder.path)
    console.print(
        f"simulated {result.ended_s:,.1f} s in {result.real_s:,.1f} s ({result.speed:,.0f} times as fast), "
        f"{result.steps:,} steps",
        style="dim",
        highlight=False,
    )
    _note(console, notes_of(plan, setup, analysis.run.requests))
    console.print(f"result: {folder.path}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(analysis.verdict.exit_code)


def _compare(text: str, rates: str | None, load: BenchOptions, setup: Any, *, report: bool) -> int:
    """Run the family; 0 unless nothing could be judged, or not all that was asked for."""
    from paceline.simulate.family import family_json, points_of, print_family, run_family, write_family

    knob, _, names = text.partition("=")
    policies = [name.strip() for name in names.split(",") if name.strip()]
    if knob.strip() != "policy" or not policies:
        raise usage_error(f"{text!r} is not policy=NAME,NAME,...", "--compare")
    plan = plan_of(load, setup)
    points = points_of(plan, _numbers(rates))
    out = out_folder(load, "comparison")
    with view_for(f"simulate {setup.target['model']}", load.quiet) as view:
        members = run_family(points, setup, policies, out, view, on_member=lambda one: view.note(one.line()))
    console = console_for(err=load.as_json)
    if load.as_json:
        put_json(family_json(members))
    else:
        print_family(console, members)
    if report:
        write_family(members, plan, out)
    of_slo = [dataclasses.replace(setup, config=dataclasses.replace(setup.config, policy=name)) for name in policies]
    requests = [request for member in members for request in member.analysis.run.requests]
    _note(console, list(dict.fromkeys(note for one in of_slo for note in notes_of(plan, one, requests))))
    console.print(f"result: {out}", highlight=False, markup=False, soft_wrap=True)
    return 0 if members and not members[-1].interrupted else 3


def _note(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _numbers(text: str | None) -> list[float]:
    try:
        values = [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise usage_error("numbers separated by commas", "--rates") from None
    if any(not 0.0 < value < float("inf") for value in values):
        raise usage_error("numbers above 0", "--rates")
    return values


@group.command("capacity")
@with_settings("scheduler", "kv")
@takes(EngineOptions, "engine")
@takes(FleetOptions, "fleet")
@takes(BenchOptions, "load", LOAD_OPTIONS)
def capacity_command(
    resolved: Resolved,
    engine: EngineOptions,
    fleet: FleetOptions,
    load: BenchOptions,
    word: ModelWord = None,
    low: Annotated[float, typer.Option(help="Rate to begin with; if it does not hold, the answer is none.")] = 0.5,
    high: Annotated[float, typer.Option(help="Rate to stop at.")] = 1000.0,
    resolution: Annotated[float, typer.Option(help="Relative width at which the search ends.")] = 0.05,
    attempts: Annotated[int, typer.Option(help="Runs at one rate that cannot tell before it counts as failed.")] = 3,
    confirmations: Annotated[int, typer.Option(help="Fresh runs at the answer.")] = 1,
    attainment: Annotated[str, typer.Option(help="With --slo and no --gate: share that must meet them.")] = "95%",
    report: Report = True,
) -> None:
    """The highest rate inside the promise; 0 when one was found, 1 when none holds."""
    from paceline.measure.capacity import Answer, SearchSettings
    from paceline.measure.cli_series import tell_capacity
    from paceline.simulate.many import simulator_of
    from paceline.simulate.run import find_rate

    if not load.gate:
        if not load.slo:
            raise usage_error("capacity needs a promise to keep: give at least one --gate or --slo")
        load = dataclasses.replace(load, gate=[f"goodput >= {attainment}"])
    setup = setup_of(_named(engine, word), resolved.settings.scheduler, resolved.settings.kv)
    plan = plan_of(load, setup, needs_load=False)
    settings = SearchSettings(low, high, resolution, attempts, confirmations)
    simulator = simulator_of(fleet_of(fleet, setup))
    out = out_folder(load, "capacity")
    with view_for(f"capacity of {setup.target['model']}", load.quiet) as view:

        def show(rate: float, attempt: int, answer: Answer, why: str) -> None:
            view.note(f"{rate:g}/s, run {attempt}: {answer.value}  {why}")

        found = find_rate(plan, setup, out, settings, view, show, simulator)
    _note(console_for(err=True), notes_of(plan, setup))
    tell_capacity(found, out, as_json=load.as_json, report=report)
