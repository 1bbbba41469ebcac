"""Loads, and who plays them: `paceline bench`'s own runner, here and in a process of its own beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.measure.folder import RunFolder
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target, Trace
from paceline.measure.records import RequestRecord
from paceline.measure.runner import run
from paceline.measure.schedule import seeded

BEGIN_S = 60.0  # for a run beside another to begin
UNTIL_STOPPED_S = 3600.0  # duration of a load that is stopped when the run beside it has ended
STOP_S = 30.0  # for it to stop


class NotComplete(Exception):
    """A run ended before its load did."""


@dataclass(frozen=True)
class Played:
    """What one run gave."""

    records: list[RequestRecord]
    folder: RunFolder

    @property
    def zero_s(self) -> float:
        """Of its axis, on the monotonic clock."""
        return self.folder.manifest.segments[0].t0_ns / 1e9


def plan_of(url: str, load: Load, salt: str, *, slos: Sequence[str] = (), seed: int = 0, **target: Any) -> BenchPlan:
    """Text completions of forced length. Every `salt` has prompts of its own, so no prefix cache knows them."""
    return BenchPlan(
        target=Target(url=url, endpoint="completions", ignore_eos="on", **target),
        load=load,
        prompts=Prompts(input=Length(), output=Length(), salt=salt),
        client=ClientPlan(warmup_requests=2, self_check=False, keep_text=False),
        slos=tuple(slos),
        seed=seed,
    )


def streams(url: str, salt: str, *, tokens_in: int, tokens_out: int, count: int, duration_s: float) -> BenchPlan:
    """`count` streams at all times: where one ends the next begins."""
    load = Load(arrivals=Arrivals.CLOSED, concurrency=count, duration_s=duration_s, stagger_s=0.05 * count)
    plan = plan_of(url, load, salt)
    prompts = Prompts(input=Length(value=tokens_in), output=Length(value=tokens_out), salt=salt)
    return msgspec.structs.replace(plan, prompts=prompts)


def with_trace(plan: BenchPlan, path: Path, rows: Iterable[dict[str, Any]]) -> BenchPlan:
    """The plan with its lengths, and its times if the load asks for them, from a trace written to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return msgspec.structs.replace(plan, trace=Trace(path=str(path), format="jsonl"))


def rows_of(lengths: Iterable[tuple[int, int]], **labels: Any) -> list[dict[str, Any]]:
    """Trace rows without times."""
    return [{"input_tokens": size, "output_tokens": new, **labels} for size, new in lengths]


def poisson(rate: float, start_s: float, end_s: float, seed: str) -> list[float]:
    """Arrivals of a Poisson process between two times."""
    rng, times, now_s = seeded(seed), [], start_s
    while (now_s := now_s + rng.expovariate(rate)) < end_s:
        times.append(now_s)
    return times


def play(plan: BenchPlan, path: Path) -> Played:
    """Carry out a plan. Raises NotComplete when it was cut short; Ctrl-C is one way."""
    folder = run(plan, path)
    ended = folder.manifest.segments[-1].ended if folder.manifest.segments else "not begun"
    if ended == "interrupted":
        raise KeyboardInterrupt
    if ended != "complete":
        raise NotComplete(f"{path}: {ended}")
    return Played(folder.records(), folder)


def play_beside(plan: BenchPlan, path: Path, other: BenchPlan, other_path: Path) -> list[Played]:
    """Two runs at once on one server; what both gave.

    `plan` begins once `other` has begun, and `other` is stopped when `plan` has ended: what it has running then is
    recorded as cancelled.
    """
    process = multiprocessing.get_context("spawn").Process(target=_carry, args=(other.to_dict(), str(other_path)))
    process.start()
    try:
        _await_begin(other_path, process)
        first = play(plan, path)
        if not process.is_alive():
            raise NotComplete(f"{other_path}: ended with code {process.exitcode} before the run beside it")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(STOP_S)
    finally:
        if process.is_alive():
            process.terminate()
            process.join()
    folder = RunFolder(other_path)
    return [first, Played(folder.records(), folder)]


def _carry(plan: dict[str, Any], path: str) -> None:
    """In a process of its own; its main thread, where the runner hears Ctrl-C."""
    run(BenchPlan.from_dict(plan), Path(path))


def _await_begin(path: Path, process: multiprocessing.process.BaseProcess) -> None:
    """Return once the run in `path` has its zero. Raises NotComplete when it ends before, or takes too long."""
    deadline = time.monotonic() + BEGIN_S
    while time.monotonic() < deadline:
        if (path / "manifest.json").exists() and RunFolder(path).manifest.segments:
            return
        if not process.is_alive():
            raise NotComplete(f"{path}: ended with code {process.exitcode} before it began")
        time.sleep(0.05)
    raise NotComplete(f"{path}: did not begin within {BEGIN_S:g} s")
