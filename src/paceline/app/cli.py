"""The `paceline` command.

This file and what it imports load neither torch nor transformers nor the server, so that `--help` is instant; each
command imports what it needs when it runs. Errors that Paceline raises on purpose become one line on stderr and an
exit code (the table below); anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130

try:
    import importlib
    from typing import Annotated

    import typer

    from paceline.errors import ConfigError, EngineError, ModelError, ModelNotFound, PacelineError, RequestError
    from paceline.version import __version__
except KeyboardInterrupt:  # `main`, which would take it, does not exist yet
    sys.exit(INTERRUPTED)

# As sysexits.h numbers them, the most special error first.
EXIT_CODES: tuple[tuple[type[PacelineError], int], ...] = (
    (ConfigError, 64),  # EX_USAGE
    (RequestError, 65),  # EX_DATAERR: a prompt or a key that cannot be taken
    (ModelNotFound, 66),  # EX_NOINPUT
    (ModelError, 65),  # EX_DATAERR: a model that cannot be read or run
    (EngineError, 70),  # EX_SOFTWARE
    (PacelineError, 1),
)

# Modules of `app.commands`, in the order of the help.
_COMMANDS = (
    "serve",
    "chat",
    "generate",
    "batch",
    "calibrate",
    "models",
    "plan",
    "simulate",
    "show",
    "timeline",
    "keys",
)


def make_app(word: str = "") -> typer.Typer:
    """The command line; of its commands, those of the module that `word` names, if it names one.

    All the others take a tenth of a second to import, and every start of a server would wait for them.
    """
    app = typer.Typer(
        name="paceline",
        help="LLM inference that holds the latency it promised.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in (word,) if word in _COMMANDS else _COMMANDS:
        importlib.import_module(f"paceline.app.commands.{name}").register(app)
    if word not in _COMMANDS:
        import paceline.measure.cli  # noqa: F401  # puts the commands into `bench`
        from paceline.measure.cli_base import app as bench

        app.add_typer(bench)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def exit_code(error: PacelineError) -> int:
    """The code `paceline` ends with when this error ends it."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def main() -> None:
    """Entry point of the `paceline` script."""
    try:
        make_app(*sys.argv[1:2])(standalone_mode=True)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
