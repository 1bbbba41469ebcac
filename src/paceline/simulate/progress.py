"""What is watched while a simulation runs: whether it leads anywhere, and how far it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from paceline.measure.progress import Progress

WINDOW_S = 60.0  # of virtual time, over which the pace of starts is looked at
PROGRESS_EVERY = 512  # events between two looks at the wall clock
PROGRESS_S = 0.25  # of wall clock between two progress reports

OnProgress = Callable[[Progress], None]


class Backlog:
    """Whether those who wait become more and more, for ever."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._seen: deque[tuple[float, int]] = deque()  # (time, requests started so far)
        self.hopeless = False
        self.why = ""

    def look(self, now_s: float, started: int, waiting: int, *, more: bool) -> None:
        """So many have been started so far, so many wait, and `more` are to come or not."""
        seen = self._seen
        seen.append((now_s, started))
        while now_s - seen[0][0] > WINDOW_S:
            then_s, before = seen.popleft()
            if not more or not waiting:
                continue
            pace = max(started - before, 1) / (now_s - then_s)  # at least one: a step may be long
            if waiting / pace > self._most_s:
                self.hopeless = True
                self.why = (
                    f"{waiting:,} requests wait, {pace:.3g} a second are started, and more are to come "
                    f"(they would wait longer than {self._most_s:g} s)"
                )


class Show:
    """Tells whoever watches, a few times a second of the wall clock."""

    def __init__(self, on_progress: OnProgress | None, total: int | None) -> None:
        self._tell = on_progress
        self._progress = Progress(stage="running", planned=total or 0)
        self._turns = 0
        self._told = 0.0

    def maybe(self, now_s: float, sent: int, in_flight: int, ended: int, failed: int) -> None:
        """Tell, if it is time."""
        self._turns += 1
        if self._tell is None or self._turns % PROGRESS_EVERY:
            return
        now = time.perf_counter()
        if now - self._told >= PROGRESS_S:
            self._told = now
            self._fill(now_s, sent, in_flight, ended, failed)

    def last(self, now_s: float, sent: int, in_flight: int, ended: int, failed: int) -> None:
        """It is over."""
        if self._tell is not None:
            self._progress.stage = "done"
            self._fill(now_s, sent, in_flight, ended, failed)

    def _fill(self, now_s: float, sent: int, in_flight: int, ended: int, failed: int) -> None:
        assert self._tell is not None
        progress = self._progress
        progress.elapsed_s, progress.sent, progress.in_flight = now_s, sent, in_flight
        progress.done, progress.failed = ended, failed
        progress.rate = sent / now_s if now_s > 0.0 else None
        self._tell(progress)
