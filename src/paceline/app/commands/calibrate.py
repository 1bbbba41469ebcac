"""`paceline calibrate`: measure this machine for two minutes, so that `simulate` and `plan` speak of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings
from paceline.errors import ConfigError
from paceline.measure.options import a_path

if TYPE_CHECKING:
    from paceline.app.calibration_load import Told
    from paceline.cost.fit import Calibration

FULL_S, QUICK_S, LEAST_S = 120.0, 25.0, 5.0
INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


@with_settings("model", "scheduler", "kv", model_argument=True)
def calibrate(
    resolved: Resolved,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.", parser=a_path, metavar="PATH")] = Path(
        "calibration.json"
    ),
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN|URL",
            help="Fit to what was recorded instead of measuring: the URL of a running server, a call log, what "
            "`paceline timeline --json` printed, a folder with these, a bench run of a call log's traffic. May be "
            "given several times. Overheads that the sources do not tell stay as they are in --out.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_S:g} s instead of two minutes: rougher.")] = False,
    seconds: Annotated[float | None, typer.Option("--seconds", help="How long the traffic lasts.")] = None,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the server's call log in this folder.", parser=a_path, metavar="PATH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The calibration on standard output too.")] = False,
) -> None:
    """Measure how long this machine's steps take, and what lies between them and a client.

    Starts the server that the settings describe, sends it two minutes of traffic that covers decode batches, contexts,
    prompts of many sizes at several positions and bursts, and fits a cost model with its intervals. The file goes to
    `paceline simulate --calibration FILE`. Keep the machine quiet meanwhile.
    """
    from paceline.app import calibrating

    if source:
        made = calibrating.recalibrate(source, out)
    else:
        wanted = seconds if seconds is not None else QUICK_S if quick else FULL_S
        if not LEAST_S <= wanted <= 3600.0:
            raise ConfigError(f"--seconds is {wanted:g}; it must be from {LEAST_S:g} to 3600")
        _check_writable(out)
        with progress_on_stderr(wanted) as told:
            made = calibrating.calibrate(resolved.settings, wanted, seed=seed, told=told, keep=keep)
    made.save(out)
    doubts = calibrating.doubts(made)
    if as_json:
        typer.echo(json.dumps(made.to_row()))
        for doubt in doubts:
            typer.echo(f"warning: {doubt}", err=True)
    else:
        show(made, out, doubts)
    if made.provenance.get("interrupted"):
        raise typer.Exit(INTERRUPTED)


def _check_writable(out: Path) -> None:
    """Found out now, not after two minutes."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: a file in a folder that exists is needed")


@contextmanager
def progress_on_stderr(seconds: float) -> Iterator[Callable[[Told], None]]:
    """A bar on a terminal, else a line for each stage."""
    if not sys.stderr.isatty():
        yield _line_by_line()
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn())
    rest = (progress.TextColumn("{task.fields[requests]} requests"), progress.TimeRemainingColumn())
    with progress.Progress(*columns, *rest, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrating", total=seconds, requests=0)

        def told(now: Told) -> None:
            bar.update(task, description=now.stage, completed=min(now.elapsed_s, seconds), requests=now.requests)

        yield told


def _line_by_line() -> Callable[[Told], None]:
    last = ""

    def told(now: Told) -> None:
        nonlocal last
        if now.stage != last:
            last = now.stage
            print(f"calibrating: {last}", file=sys.stderr, flush=True)

    return told


def show(made: Calibration, out: Path, doubts: list[str]) -> None:
    """What was found, for people."""
    from rich.console import Console
    from rich.table import Table

    from paceline.cost.fitted import HIGH, LOW

    console = Console()
    median, p95 = made.cost.errors()
    console.print(
        f"{made.provenance['steps']} steps; a step that the fit has not seen is off by {median:.1%} (median), "
        f"{p95:.1%} (p95)",
        highlight=False,
    )
    table = Table("kind", "up to tokens", "steps", "nine in ten take", box=None, pad_edge=False)
    for band in made.cost.bands:
        spread = f"{band.ratios[LOW]:.2f} to {band.ratios[HIGH]:.2f} of the expected"
        table.add_row(band.kind, f"{band.most_tokens:g}", str(band.rows), spread)
    console.print(table)
    for kind, most in made.cost.ranges.items():
        console.print(f"{kind} steps known up to {_words(most)}", highlight=False)
    between = made.overheads
    console.print(
        f"client to scheduler {1e3 * between.before_s:.2f} ms and {1e6 * between.before_token_s:.2f} us a prompt "
        f"token; back {1e3 * between.after_s:.2f} ms and {1e6 * between.after_row_s:.1f} us for each row before it",
        highlight=False,
    )
    toll = made.cost.toll
    console.print(
        f"a step takes longer by {_range(toll.sent_s, toll.sent_range_s)} for each token that is sent meanwhile, "
        f"{_range(toll.request_s, toll.request_range_s)} for each request that comes, "
        f"{_range(toll.prompt_token_s, toll.prompt_token_range_s)} for each token of its prompt",
        highlight=False,
    )
    for doubt in doubts:
        console.print(f"[yellow]careful:[/yellow] {doubt}", highlight=False)
    console.print(f"written to {out}", highlight=False, soft_wrap=True)


def _range(seconds: float, range_s: tuple[float, float]) -> str:
    """Microseconds, with where nine in ten fits lie."""
    low, high = range_s
    return f"{1e6 * seconds:.0f} us ({1e6 * low:.0f} to {1e6 * high:.0f})"


def _words(most: Any) -> str:
    return f"{most.tokens} tokens, {most.rows} requests, {most.context} positions of context"
