"""What people see while they wait: the stages of a cold start with their times, and downloads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from paceline.app.store import Progress

if TYPE_CHECKING:
    from paceline.engine.messages import Stage


class StagePrinter:
    """Writes one line for each stage as it ends; on a terminal also one that moves, for the stage that runs."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._is_terminal = self._file.isatty()

    def __call__(self, stage: Stage) -> None:
        if stage.seconds is not None:
            self._erase()
            print(f"  {stage.name:<12}{stage.seconds:6.1f} s", file=self._file, flush=True)
        elif self._is_terminal:
            share = "" if stage.fraction is None else f"{stage.fraction:6.0%}"
            self._erase()
            print(f"  {stage.name:<12}{share}", end="", file=self._file, flush=True)

    def _erase(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._file)


@contextmanager
def progress_on_stderr(title: str) -> Iterator[Progress]:
    """A bar on a terminal; one line for each stage where stderr is a file or a pipe."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_by_line(title)
        return
    from rich import progress as rich

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
    rest = (rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, *rest, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda stage, done, total: bar.update(
            task, description=f"{title}: {stage}", completed=done, total=total or None
        )


def _line_by_line(title: str) -> Progress:
    last = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last:
            print(f"{title}: {stage}", file=sys.stderr, flush=True)
            last = stage

    return report
