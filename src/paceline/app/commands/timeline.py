"""`paceline timeline`: the last steps of a running server, as text, as JSON or as a page to keep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError, EngineError, Unauthorized

BARS = " ▁▂▃▄▅▆▇█"


def register(app: typer.Typer) -> None:
    app.command("timeline")(timeline)


def timeline(
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:8000",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a page that draws the steps (self-contained HTML).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The rows as one JSON object.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many steps to print.")] = 40,
) -> None:
    """Show what the engine's last steps held and how long they took: prefill on decode, expected against real.

    A running server draws the same live at /timeline.
    """
    report = fetch(url)
    if as_json:
        typer.echo(json.dumps(report))
        return
    if out is not None:
        from paceline.serve.timeline import page

        try:
            out.write_text(page(json.dumps(report)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error
        typer.echo(f"{out}: {len(report['rows'])} steps")
        return
    show(report, last)


def fetch(url: str) -> dict[str, Any]:
    """The rows of the server at `url`. Raises EngineError where there is none, Unauthorized, ConfigError."""
    import httpx

    key = os.environ.get("PACELINE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/timeline/steps", headers=headers, timeout=10.0)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    except httpx.HTTPError as error:
        raise EngineError(f"no answer from {url}: {error}") from error
    if answer.status_code == 401:
        raise Unauthorized(f"{url} wants a key: set PACELINE_API_KEY")
    try:
        report = answer.json() if answer.status_code == 200 else None
    except ValueError:
        report = None
    if not isinstance(report, dict) or "columns" not in report or "rows" not in report:
        raise EngineError(f"{url} is not a Paceline server: /timeline/steps answered {answer.status_code}")
    return report


def show(report: dict[str, Any], last: int) -> None:
    """A table of the newest steps, with a bar for the time of each against the promise."""
    from rich.console import Console
    from rich.table import Table

    rows = [dict(zip(report["columns"], row, strict=True)) for row in report["rows"][-last:]]
    if not rows:
        typer.echo("no step yet: the server has had nothing to do")
        return
    promise_s = report["itl_s"]
    most_s = max([row["seconds"] for row in rows] + ([promise_s] if promise_s else []))
    table = Table("step", "prefill", "decode", "ms", "expected", "", "running", "waiting", "KV", "bound by", box=None)
    for row in rows:
        late = promise_s is not None and row["seconds"] > promise_s
        expected = "-" if row["predicted_s"] is None else f"{1000 * row['predicted_s']:.1f}"
        cells = [
            row["step"],
            row["prefill_tokens"],
            row["decode_tokens"],
            f"{1000 * row['seconds']:.1f}",
            expected,
            BARS[round(row["seconds"] / most_s * (len(BARS) - 1))],
            row["running"],
            row["waiting"],
            f"{row['kv_usage']:.0%}",
            row["bound_by"],
        ]
        table.add_row(*map(str, cells), style="red" if late else None)
    console = Console()
    console.print(table)
    if promise_s is not None:
        console.print(f"tightest promise between tokens: {1000 * promise_s:g} ms; steps beyond it are red")
