"""`paceline batch`: a file of requests in OpenAI's Batch format, answered here, without a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command("batch")(batch)


@with_settings("model", "scheduler", "kv")
def batch(
    resolved: Resolved,
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where answers go, in the order they end.")],
    errors: Annotated[
        Path | None, typer.Option(help="Where failed requests go; default OUT.errors.jsonl.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on where OUT.jsonl ends, or throw it away first.")
    ] = True,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once; max_num_seqs if not given.", show_default=False)
    ] = None,
) -> None:
    """Answer a file of requests with a model in this process's care.

    However a run ends, the same command goes on where it stopped: nothing is lost, nothing is answered twice. Ends
    with 0 when all requests succeeded, 1 when some failed, 130 when interrupted.
    """
    from paceline.app.batching import BatchFiles, run_batch

    files = BatchFiles(requests, output, errors or output.with_suffix(".errors.jsonl"))
    try:
        code = run_batch(resolved.settings, files, resume=resume, concurrency=concurrency)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("paceline: interrupted; the same command goes on from here", file=sys.stderr)
        code = INTERRUPTED
    raise typer.Exit(code)
