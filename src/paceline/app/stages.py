"""A cold start for people: each stage with its time, and how far the running one is."""

from __future__ import annotations

import sys
from typing import TextIO

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
