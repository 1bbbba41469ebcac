"""`paceline serve`: the OpenAI-compatible server."""

from __future__ import annotations

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings
from paceline.app.settings import SLICES


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


@with_settings(*SLICES, model_argument=True)
def serve(resolved: Resolved) -> None:
    """Serve a model over the OpenAI API. SIGTERM and Ctrl-C let running requests end; a second one does not wait."""
    from paceline.app import serving

    raise typer.Exit(serving.serve(resolved.settings))
