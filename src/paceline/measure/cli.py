"""`paceline bench`: measure any OpenAI-compatible server.

    paceline bench URL --rate 5                 one run (`bench run URL` in full)
    paceline bench sweep URL --rates 1,2,4,8
    paceline bench capacity URL --slo "ttft<=500ms"
    paceline bench compare URL_A URL_B | DIR_A DIR_B
    paceline bench report DIR, resume DIR, rerun DIR, conformance

Exit codes: 0 PASS, 1 FAIL, 2 UNDECIDED or DEGRADED, 3 INVALID or could not run, 64 a command line that cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError
from paceline.measure.options import BenchOptions, seconds, takes_options, to_plan, usage_error

COULD_NOT_RUN = 3
USAGE = 64
PIPE_WIDTH = 200  # columns where nobody's window sets them
DEFAULT_COMMAND = "run"
_UsageError = typer.BadParameter.__mro__[1]  # typer keeps its click to itself

C = TypeVar("C", bound=Callable[..., Any])


@contextlib.contextmanager
def _usage_is_64() -> Iterator[None]:
    """Typer ends with 2 for a command line that it cannot read; 2 means UNDECIDED here."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _UsageError):
            error.exit_code = USAGE  # type: ignore[attr-defined]
        raise


class BenchGroup(TyperGroup):
    """`bench URL` means `bench run URL`; what cannot be read ends with 64."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [DEFAULT_COMMAND, *args]
        with _usage_is_64():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage_is_64():
            return super().invoke(ctx)


app = typer.Typer(
    name="bench",
    cls=BenchGroup,
    help="Measure any OpenAI-compatible server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str) -> Callable[[C], C]:
    """Register a command whose Paceline errors are one line on stderr and exit code 3."""

    def register(work: C) -> C:
        @functools.wraps(work)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return work(*args, **kwargs)
            except PacelineError as error:
                print(f"paceline bench: {error}", file=sys.stderr)
                raise typer.Exit(COULD_NOT_RUN) from None

        if hasattr(work, "__signature__"):
            guarded.__signature__ = work.__signature__  # type: ignore[attr-defined]
        app.command(name)(guarded)
        return work

    return register


Url = Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="Folder of a result.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]
Report = Annotated[bool, typer.Option(help="Write report.html into the folder.")]
Baseline = Annotated[Path | None, typer.Option(help="Run that relative gates are held against.")]


def _out(options: BenchOptions, kind: str) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    return options.out or Path("results") / f"{now:%Y%m%d-%H%M%S}-{kind}"


def _console(*, err: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    return Console(stderr=err, width=None if stream.isatty() else PIPE_WIDTH)


def _view(title: str, quiet: bool) -> Any:
    from paceline.measure.live import View

    return View(_console(err=True), title, quiet=quiet)


def _show_run(folder: Any, baseline: Path | None, report: bool) -> int:
    """Judge, print and report one run; its exit code."""
    from paceline.measure.analysis import analyse
    from paceline.measure.console import print_analysis
    from paceline.measure.folder import RunFolder

    analysis = analyse(folder, baseline=None if baseline is None else RunFolder(baseline))
    console = _console()
    print_analysis(console, analysis)
    if report:
        from paceline.measure.report.write import write_run

        write_run(analysis, folder.path)
    console.print(f"result: {folder.path}", highlight=False, markup=False, soft_wrap=True)
    return analysis.verdict.exit_code


@command("run")
@takes_options
def run_command(url: Url, baseline: Baseline = None, report: Report = True, *, options: BenchOptions) -> None:
    """One run: state a load by --rate, --concurrency or --trace."""
    from paceline.measure.folder import RunFolder
    from paceline.measure.runner import run

    plan = to_plan(url, options)
    if baseline is not None:
        RunFolder(baseline)  # found out now, not after the run
    with _view(f"bench {plan.target.url}", options.quiet) as view:
        folder = run(plan, _out(options, "run"), view)
    raise typer.Exit(_show_run(folder, baseline, report))


@command("resume")
def resume_command(folder: Folder, baseline: Baseline = None, report: Report = True, quiet: Quiet = False) -> None:
    """Carry on a run that was interrupted or crashed."""
    from paceline.measure.runner import resume

    with _view(f"resume {folder}", quiet) as view:
        resumed = resume(folder, view)
    raise typer.Exit(_show_run(resumed, baseline, report))


@command("rerun")
def rerun_command(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="Folder of the new result.")] = None,
    url: Annotated[str | None, typer.Option(help="Another server, under the same load.")] = None,
    fresh_prompts: Annotated[
        bool, typer.Option("--fresh-prompts", help="Other texts of the same lengths: a cold cache.")
    ] = False,
    baseline: Baseline = None,
    report: Report = True,
    quiet: Quiet = False,
) -> None:
    """The same load again: same arrivals, lengths and, unless asked otherwise, texts."""
    from paceline.measure.runner import rerun

    target = _out(BenchOptions(out=out), "rerun")
    with _view(f"rerun {folder}", quiet) as view:
        again = rerun(folder, target, view, fresh_prompts=fresh_prompts, url=url)
    raise typer.Exit(_show_run(again, baseline, report))


@command("sweep")
@takes_options
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
    from paceline.measure.sweep import Point, run_sweep

    if (rates is None) == (concurrencies is None):
        raise usage_error("give --rates or --concurrencies")
    axis = "rate" if rates is not None else "concurrency"
    values = _numbers(rates or concurrencies or "", f"--{axis}s")
    plan = to_plan(url, options, needs_load=False)
    out = _out(options, "sweep")
    with _view(f"sweep {plan.target.url}", options.quiet) as view:

        def show(point: Point) -> None:
            outcome = point.analysis.verdict.outcome.value
            view.note(f"{axis} {point.value:g}: {outcome}  {point.analysis.verdict.headline}")

        points = run_sweep(plan, axis, values, out, view, show)
    console = _console()
    print_sweep(console, axis, points)
    if report:
        from paceline.measure.report.write import write_sweep

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


@command("capacity")
@takes_options
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
    from paceline.measure.console import print_capacity

    if not options.gate:
        if not options.slo:
            raise usage_error("capacity needs a promise to keep: give at least one --gate or --slo")
        options = _with_gate(options, f"goodput >= {attainment}")
    plan = to_plan(url, options, needs_load=False)
    settings = SearchSettings(low, high, resolution, attempts, confirmations)
    out = _out(options, "capacity")
    with _view(f"capacity {plan.target.url}", options.quiet) as view:

        def show(rate: float, attempt: int, answer: Answer, why: str) -> None:
            view.note(f"{rate:g}/s, run {attempt}: {answer.value}  {why}")

        found = run_capacity(plan, out, settings, view, show)
    console = _console()
    print_capacity(console, found)
    if report:
        from paceline.measure.report.write import write_capacity

        write_capacity(out, out)
    console.print(f"result: {out}", highlight=False, markup=False, soft_wrap=True)
    if found.best is not None:
        raise typer.Exit(0 if found.limited_by in ("server", "range") else 2)
    raise typer.Exit({"client": 3, "user": 3}.get(found.limited_by, 1))


def _with_gate(options: BenchOptions, gate: str) -> BenchOptions:
    return dataclasses.replace(options, gate=[gate])


@command("compare")
@takes_options
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

    saved = [Path(side).is_dir() for side in (a, b)]
    if any(saved) and not all(saved):
        raise usage_error("compare two URLs or two folders, not one of each")
    if all(saved):
        comparison, out = _compare_saved(Path(a), Path(b), smallest_effect), options.out
    else:
        out = _out(options, "compare")
        comparison = _compare_live(a, b, b_extra, options, out, pairs, aa_pairs, cache, smallest_effect)
    console = _console()
    print_comparison(console, comparison)
    if report and out is not None:
        from paceline.measure.report.write import write_comparison

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
    with _view("compare", options.quiet) as view:

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


@command("report")
def report_command(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="Where to write; without it beside the result.")] = None,
    baseline: Baseline = None,
    gate: Annotated[list[str] | None, typer.Option(help="Judge by these gates instead. Repeatable.")] = None,
    slo: Annotated[list[str] | None, typer.Option(help="Judge by these objectives instead. Repeatable.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Cost of the server.")] = None,
    undecided_fails: Annotated[
        bool, typer.Option("--undecided-fails", help="JUnit: an undecided gate is a failure, not skipped.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write report.html and summary.json of a result; of a run also requests.csv and junit.xml."""
    from paceline.measure.report.write import write_report

    written = write_report(
        folder,
        out,
        baseline=baseline,
        gates=gate,
        slos=slo,
        price_per_hour=price_per_hour,
        undecided_fails=undecided_fails,
    )
    if not quiet:
        print(written.headline)
        for path in written.files:
            print(path)
    raise typer.Exit(written.exit_code)


@command("conformance")
def conformance_command(
    cases: Annotated[list[str] | None, typer.Argument(help="Case ids; none: all.", show_default=False)] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the cases.")] = False,
    serve: Annotated[int | None, typer.Option(help="Serve the pack on this port, for other clients.")] = None,
    check: Annotated[Path | None, typer.Option(help="Judge another client's reports (JSON).")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the pack's files into this folder.")] = None,
    tolerance: Annotated[str, typer.Option(help="How far a time may be off.")] = "25ms",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable results.")] = False,
) -> None:
    """Play the conformance pack to our own client, or serve it to another one and check what it reports."""
    from paceline.measure.conformance import cli as pack

    if list_only:
        print("\n".join(pack.list_cases()))
        return
    if export is not None:
        for path in pack.export(export):
            print(path)
        return
    if serve is not None:
        import asyncio

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(pack.serve(serve))
        return
    tolerance_ms = seconds("--tolerance", tolerance) * 1e3
    wrong: list[str] = []
    if check is not None:
        results = pack.check_reports(check, tolerance_ms=tolerance_ms)
    else:
        results, wrong = pack.run_own(cases or (), tolerance_ms=tolerance_ms)
    if as_json:
        sys.stdout.buffer.write(pack.as_json(results, wrong) + b"\n")
    else:
        print("\n".join(pack.render(results, wrong)))
    raise typer.Exit(1 if wrong or not all(result.passed for result in results) else 0)


@command("mock")
def mock_command(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    ttft: Annotated[str, typer.Option(help="Time to first token.")] = "100ms",
    itl: Annotated[str, typer.Option(help="Time between tokens.")] = "20ms",
) -> None:
    """Serve the built-in mock with exact times, to try things on."""
    import asyncio

    from paceline.measure.mock import MockServer
    from paceline.measure.mockapi import MockApi, MockConfig

    config = MockConfig(ttft_ms=seconds("--ttft", ttft) * 1e3, itl_ms=seconds("--itl", itl) * 1e3, port=port, log=False)

    async def serve() -> None:
        async with MockServer(MockApi(config), port=port) as server:
            print(f"mock at {server.url}", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def main() -> None:
    """For `python -m paceline.measure.cli`."""
    app()


if __name__ == "__main__":
    main()
