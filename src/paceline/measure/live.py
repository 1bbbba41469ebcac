"""What a person sees while a run runs: one redrawn panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.measure.progress import Progress

PLAIN_EVERY_S = 5.0
REDRAW_PER_S = 4


def ms(seconds: float | None) -> str:
    """Milliseconds for people; a dash for what is not known."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def bar(done: float, width: int = 24) -> str:
    """A bar of blocks for a share between 0 and 1."""
    filled = round(max(0.0, min(1.0, done)) * width)
    return "━" * filled + "╌" * (width - filled)


def share_done(progress: Progress) -> float | None:
    """How much of the run is over, by time or by requests; None where nobody can tell."""
    if progress.planned_s:
        return min(1.0, progress.elapsed_s / progress.planned_s)
    if progress.planned:
        return progress.done / progress.planned
    return None


def panel(progress: Progress, title: str) -> Table:
    """The redrawn view."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    done = share_done(progress)
    head = Text(f"{title}  ", style="bold").append(progress.stage, style="cyan")
    table.add_row("", head)
    if progress.stage not in ("running", "stopping", "done"):
        return table
    over = f"{progress.elapsed_s:,.1f} s"
    if done is not None:
        over = f"{bar(done)} {100 * done:3.0f} %  {over}"
    table.add_row("time", over)
    planned = f" of {progress.planned:,}" if progress.planned else ""
    failed = Text(f"{progress.failed:,} failed", style="red" if progress.failed else "dim")
    table.add_row("requests", Text(f"{progress.sent:,}{planned} sent, {progress.done:,} ended, ").append_text(failed))
    held = f", {progress.waiting:,} held by the cap" if progress.waiting else ""
    table.add_row("in flight", f"{progress.in_flight:,}{held}")
    table.add_row("rate", f"{number(progress.rate)} requests/s, {number(progress.tokens_per_s)} token events/s")
    table.add_row("TTFT", f"p50 {ms(progress.ttft_p50_s)}   p95 {ms(progress.ttft_p95_s)}")
    table.add_row("gap", f"p50 {ms(progress.gap_p50_s)}   p95 {ms(progress.gap_p95_s)}")
    lag = progress.lag_p99_s
    table.add_row("loop lag", Text(f"p99 {ms(lag)}", style="red" if lag is not None and lag > 0.01 else ""))
    return table


def line(progress: Progress) -> str:
    """The same in one plain line."""
    return (
        f"{progress.elapsed_s:7.1f} s  sent {progress.sent}  done {progress.done}  failed {progress.failed}  "
        f"in flight {progress.in_flight}  rate {number(progress.rate)}/s  "
        f"TTFT p50 {ms(progress.ttft_p50_s)} p95 {ms(progress.ttft_p95_s)}  "
        f"gap p50 {ms(progress.gap_p50_s)}  lag p99 {ms(progress.lag_p99_s)}"
    )


class View:
    """Shows progress on a console. A context manager; call it with each Progress."""

    def __init__(self, console: Console, title: str, *, quiet: bool = False) -> None:
        self._console, self.title, self._quiet = console, title, quiet
        self._live: Live | None = None
        self._stage = ""
        self._last = float("-inf")

    def __enter__(self) -> View:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=REDRAW_PER_S, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(panel(progress, self.title))
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._say(f"{self.title}: {progress.stage}")
            self._last = now
        elif progress.stage == "running" and now - self._last >= PLAIN_EVERY_S:
            self._last = now
            self._say(line(progress))

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
