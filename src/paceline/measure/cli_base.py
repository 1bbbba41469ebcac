"""What all `paceline bench` commands share: the group, how errors end, where results go, who shows progress."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError
from paceline.measure.options import BenchOptions

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
                said = str(error)
            except BrokenPipeError:  # `| head` has seen enough; what the interpreter still flushes goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                said = "nobody reads the output any more"
            except OSError as error:  # a full disk, a folder that went away
                said = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            except KeyboardInterrupt:  # outside a run, which ends itself in order
                said = "stopped"
            print(f"paceline bench: {said}", file=sys.stderr)
            raise typer.Exit(COULD_NOT_RUN)

        if hasattr(work, "__signature__"):
            guarded.__signature__ = work.__signature__  # type: ignore[attr-defined]
        app.command(name)(guarded)
        return work

    return register


Url = Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="Folder of a result.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
Report = Annotated[bool, typer.Option(help="Write report.html into the folder.")]
Baseline = Annotated[Path | None, typer.Option(help="Run that relative gates are held against.")]


def out_folder(options: BenchOptions, kind: str) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    return options.out or Path("results") / f"{now:%Y%m%d-%H%M%S}-{kind}"


def console_for(*, err: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    return Console(stderr=err, width=None if stream.isatty() else PIPE_WIDTH)


def put_json(data: bytes) -> None:
    """Nothing else may stand on standard output then."""
    sys.stdout.write(data.decode().rstrip() + "\n")
    sys.stdout.flush()


def view_for(title: str, quiet: bool) -> Any:
    from paceline.measure.live import View

    return View(console_for(err=True), title, quiet=quiet)
