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
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.measure.cli_base import (
    Baseline,
    Folder,
    Json,
    Quiet,
    Report,
    Url,
    app,
    command,
    console_for,
    out_folder,
    put_json,
    view_for,
)
from paceline.measure.cli_series import capacity_command, compare_command, sweep_command
from paceline.measure.options import BenchOptions, seconds, takes_options, to_plan

__all__ = ["app", "main"]


def _show_run(folder: Any, baseline: Path | None, report: bool, as_json: bool) -> int:
    """Judge, print and report one run; its exit code."""
    from paceline.measure.analysis import analyse
    from paceline.measure.console import print_analysis
    from paceline.measure.folder import RunFolder

    analysis = analyse(folder, baseline=None if baseline is None else RunFolder(baseline))
    console = console_for(err=as_json)
    if not as_json:
        print_analysis(console, analysis)
    if report or as_json:
        from paceline.measure.report.write import run_json, write_run

        if report:
            write_run(analysis, folder.path)
        if as_json:
            put_json(run_json(analysis))
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
    with view_for(f"bench {plan.target.url}", options.quiet) as view:
        folder = run(plan, out_folder(options, "run"), view)
    raise typer.Exit(_show_run(folder, baseline, report, options.as_json))


@command("resume")
def resume_command(
    folder: Folder, baseline: Baseline = None, report: Report = True, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Carry on a run that was interrupted or crashed."""
    from paceline.measure.runner import resume

    with view_for(f"resume {folder}", quiet) as view:
        resumed = resume(folder, view)
    raise typer.Exit(_show_run(resumed, baseline, report, as_json))


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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The same load again: same arrivals, lengths and, unless asked otherwise, texts."""
    from paceline.measure.runner import rerun

    target = out_folder(BenchOptions(out=out), "rerun")
    with view_for(f"rerun {folder}", quiet) as view:
        again = rerun(folder, target, view, fresh_prompts=fresh_prompts, url=url)
    raise typer.Exit(_show_run(again, baseline, report, as_json))


command("sweep")(takes_options(sweep_command))
command("capacity")(takes_options(capacity_command))
command("compare")(takes_options(compare_command))


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
