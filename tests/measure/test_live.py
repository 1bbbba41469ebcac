"""The live view says the same on a terminal and off one."""

from __future__ import annotations

import io

from rich.console import Console

from paceline.measure.jobs import Said
from paceline.measure.live import View, bar, ms, panel, share_done
from paceline.measure.progress import Gauge, Progress, quantile
from paceline.measure.records import WorkerSample


def running() -> Progress:
    return Progress(
        stage="running", elapsed_s=12.5, planned=100, sent=50, done=40, failed=2, in_flight=10, rate=4.0, ttft_p50_s=0.2
    )


def test_a_terminal_gets_a_panel() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    console.print(panel(running(), "bench x"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("50 of 100 sent", "2 failed", "4.0 requests/s", "p50 200 ms", "40 %"):
        assert part in shown, part


def test_a_pipe_gets_plain_lines_without_control_characters() -> None:
    out = io.StringIO()
    with View(Console(file=out, width=200), "bench x") as view:
        view(Progress(stage="probing"))
        view(Progress(stage="probing"))
        view(running())
        view.note("rate 5: PASS")
    lines = out.getvalue().splitlines()
    assert lines == ["bench x: probing", "bench x: running", "rate 5: PASS"]


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    with View(Console(file=out), "x", quiet=True) as view:
        view(running())
        view.note("x")
    assert out.getvalue() == ""


def test_workers_are_added_up_and_rates_taken_over_the_last_seconds() -> None:
    gauge = Gauge(Progress(planned=100))

    def said(worker: int, t: float, sent: int, ttft: tuple[float, ...] = ()) -> Said:
        sample = WorkerSample(segment=0, worker=worker, t_s=t, in_flight=2, sent=sent, done=sent - 2, lags_s=(0.001,))
        return Said(kind="progress", worker=worker, sample=sample, ttft_s=ttft)

    for second in range(20):
        for worker in (0, 1):
            progress = gauge.take(said(worker, float(second), 10 * second, (0.1,)))
    assert (progress.sent, progress.in_flight, progress.elapsed_s) == (380, 4, 19.0)
    assert progress.rate is not None
    assert abs(progress.rate - 20) < 3
    assert progress.ttft_p50_s == 0.1
    assert progress.lag_p99_s == 0.001


def test_small_helpers() -> None:
    assert ms(None) == "-"
    assert ms(0.0123) == "12.3 ms"
    assert ms(1.5) == "1,500 ms"
    assert bar(0.5, 4) == "━━╌╌"
    assert share_done(Progress()) is None
    assert share_done(Progress(planned_s=10, elapsed_s=20)) == 1.0
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
