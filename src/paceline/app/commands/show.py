"""`paceline config`: what the settings resolve to here, and where each came from."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any

import typer

from paceline.app.config import DEFAULT, Resolved
from paceline.app.kinds import class_table
from paceline.app.options import with_settings
from paceline.app.settings import SLICES, TABLE, Entry


def register(app: typer.Typer) -> None:
    app.command("config")(show_config)


@with_settings(*SLICES)
def show_config(
    resolved: Resolved, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Print what the settings resolve to here, and where each came from: flags > paceline.toml > environment."""
    if as_json:
        typer.echo(
            json.dumps(
                {
                    entry.key: {"value": shown(entry, resolved), "from": resolved.origins[entry.name]}
                    for entry in TABLE.values()
                },
                indent=2,
                default=_plain,
            )
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for entry in TABLE.values():
        value = shown(entry, resolved)
        origin = resolved.origins[entry.name]
        table.add_row(
            entry.key,
            "-" if value is None else json.dumps(value, default=_plain),
            origin,
            style="dim" if origin == DEFAULT else None,
        )
    Console().print(table)


def shown(entry: Entry, resolved: Resolved) -> Any:
    """The value as JSON can hold it; a secret is never printed."""
    value = getattr(getattr(resolved.settings, entry.slice), entry.name)
    if entry.secret and value is not None:
        return "(set)"
    if entry.name == "classes":
        return {one.name: class_table(one) for one in value}
    return dict(value) if entry.name == "policy_options" else value


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} has no plain form")
