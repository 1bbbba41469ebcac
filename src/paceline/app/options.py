"""Command-line flags made from the table of settings, so that no setting is declared twice."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.app import config
from paceline.app.config import Resolved
from paceline.app.settings import SLICES, TABLE, Entry
from paceline.errors import ConfigError

Command = Callable[..., None]


def with_settings(*slices: str, model_argument: bool = False) -> Callable[[Command], Command]:
    """Give a command the flags of these slices and `--config`; it receives `resolved: Resolved` in their place.

    With `model_argument`, the model may also be given as the one word without a flag.
    """
    entries = [entry for entry in TABLE.values() if entry.slice in slices and not entry.secret]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "resolved"]
        added = [_CONFIG, *(_parameter(entry) for entry in entries)]
        if model_argument:
            added.insert(0, _MODEL_ARGUMENT)

        @functools.wraps(command)
        def wrapper(config_file: str | None, model_word: str | None = None, **values: Any) -> None:
            flags = {entry.name: values.pop(entry.name) for entry in entries}
            if model_word is not None:
                if flags["model"] is not None:
                    raise ConfigError(f"the model is given twice: {model_word} and --model {flags['model']}")
                flags["model"] = model_word
            command(resolved=resolve_here(flags, config_file), **values)

        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return wrapper

    return decorate


def resolve_here(flags: dict[str, Any], config_file: str | None) -> Resolved:
    """Resolve against this process's folder and environment: the one place that reads them. Warnings go to stderr."""
    path = config_file or os.environ.get("PACELINE_CONFIG") or None
    environ = {name: value for name, value in os.environ.items() if name != "PACELINE_CONFIG"}
    resolved = config.resolve(flags, config.read_file(path, Path.cwd()), environ)
    for warning in resolved.warnings:
        typer.echo(f"warning: {warning}", err=True)
    return resolved


def _parameter(entry: Entry) -> inspect.Parameter:
    panel = SLICES[entry.slice].__doc__
    has_default = isinstance(entry.default, (int, float, str)) and not entry.kind.is_switch
    default = f"; default {entry.default}" if has_default else ""
    meaning = f"{entry.help[0].upper()}{entry.help[1:]}{default}."
    if entry.kind.is_switch:
        option = typer.Option(f"{entry.flag}/--no-{entry.flag[2:]}", help=meaning, rich_help_panel=panel)
        return _keyword(entry.name, Annotated[bool | None, option])
    option = typer.Option(entry.flag, metavar="VALUE", help=meaning, rich_help_panel=panel)
    return _keyword(entry.name, Annotated[str | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_CONFIG = _keyword(
    "config_file",
    Annotated[str | None, typer.Option("--config", metavar="FILE", help="Settings file; ./paceline.toml by default.")],
)
_MODEL_ARGUMENT = _keyword(
    "model_word",
    Annotated[str | None, typer.Argument(metavar="MODEL", help="Short for --model.", show_default=False)],
)
