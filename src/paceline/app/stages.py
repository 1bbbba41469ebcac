"""What people see while they wait: the stages of a cold start with their times, and downloads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from paceline.app.store import Progress

if TYPE_CHECKING:
    import rich.progress

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
    """A bar on a terminal, from the first report on; one line for each stage where stderr is a file or a pipe."""
    if not sys.stderr.isatty():
        yield _line_by_line(title)
        return
    with ExitStack() as stack:
        bar = _Bar(stack, title)
        yield bar.report


class _Bar:
    """Appears with the first report: mostly there is nothing to fetch and nothing to show."""

    def __init__(self, stack: ExitStack, title: str) -> None:
        self._stack = stack
        self._title = title
        self._bar: rich.progress.Progress | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._open()
            self._task = self._bar.add_task(self._title, total=None)
        self._bar.update(self._task, description=f"{self._title}: {stage}", completed=done, total=total or None)

    def _open(self) -> rich.progress.Progress:
        from rich import progress
        from rich.console import Console

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
        rest = (progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        bar = progress.Progress(*columns, *rest, console=Console(stderr=True), transient=True)
        return self._stack.enter_context(bar)


def _line_by_line(title: str) -> Progress:
    last = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last:
            print(f"{title}: {stage}", file=sys.stderr, flush=True)
            last = stage

    return report
