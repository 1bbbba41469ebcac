"""`paceline models` and `paceline pull`: what is known, what is here, and how it gets here."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from paceline.app import hub, store
from paceline.app.stages import progress_on_stderr
from paceline.errors import ModelNotFound


def register(app: typer.Typer) -> None:
    app.command("models")(list_models)
    app.command("pull")(pull)


def list_models(as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False) -> None:
    """List the models known by name and whether they are on this machine."""
    cache = store.default_cache_dir(os.environ)
    rows = [(known, store.cached_path(known, cache)) for known in store.KNOWN]
    if as_json:
        entries = [
            {
                "name": known.name,
                "aliases": list(known.aliases),
                "summary": known.summary,
                "bytes": known.size,
                "sha256": known.sha256,
                "licence": known.licence,
                "path": None if path is None else str(path),
            }
            for known, path in rows
        ]
        typer.echo(json.dumps(entries, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "size", "licence", "here", "what it is", box=None, pad_edge=False)
    for known, path in rows:
        table.add_row(known.name, f"{known.size / 1e6:.0f} MB", known.licence, "yes" if path else "no", known.summary)
    console = Console()
    console.print(table)
    console.print(f"\nFiles lie in {cache}.", soft_wrap=True, highlight=False)
    console.print("A model can also be a .gguf file, a folder in Hugging Face layout, or a hub id like org/name.")


def pull(name: Annotated[str, typer.Argument(help="A name from `paceline models`, or a hub id.")]) -> None:
    """Fetch a model and verify it; if it is here already, verify it."""
    cache = store.default_cache_dir(os.environ)
    known = store.find_known(name)
    with progress_on_stderr(name) as report:
        if known is not None:
            path = store.pull(known, cache, progress=report)
        elif hub.is_hub_id(name):
            path = hub.fetch(name)
        else:
            names = ", ".join(known.name for known in store.KNOWN)
            raise ModelNotFound(f"nothing to pull by the name {name!r}; known names: {names}; or give a hub id")
    typer.echo(str(path))
