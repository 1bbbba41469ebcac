"""One run: results kept by name, workers that stay loaded from repeat to repeat, quiet before each measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Report
from _server import running
from _state import State

from _cpu.limits import Clock, Limits, measure_limits
from _cpu.models import Shape
from _cpu.peers import Absent, Peers
from _cpu.systems import SYSTEMS, Room, System
from _cpu.weights import Files
from paceline.runtime.kernels.native import native, unavailable

QUIET, LOOK_S = 0.04, 0.5  # share of all cores that may be busy, over this long
HANGS_S = 900.0  # a worker that does not answer for so long is ended
START_S = 600.0  # of a server; vLLM compiles
PLAIN = range(1000, 49000)  # tokens of prompts: in every vocabulary, none of them special


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    decode_in: int = 100
    decode_out: int = 129
    prefill: int = 512
    samples: int = 2  # of one worker in a row, within a repeat
    scaling: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    scaling_in: int = 64
    scaling_out: int = 33
    served: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    served_in: int = 100
    served_out: int = 128
    large_served: tuple[int, ...] = (1, 8, 16)
    large_out: int = 33
    streams: int = 8  # of the mixed load
    newcomer_in: int = 2000
    newcomers: int = 6
    period_s: float = 10.0


FULL = Size()
SMOKE = Size(
    decode_in=20,
    decode_out=5,
    prefill=64,
    samples=1,
    scaling=(1, 3),
    scaling_in=16,
    scaling_out=4,
    served=(1, 3),
    served_in=20,
    served_out=6,
    large_served=(2,),
    large_out=4,
    streams=2,
    newcomer_in=100,
    newcomers=2,
    period_s=3.0,
)


class Failed(Exception):
    """A worker or a server broke down; the message says how."""


class Worker:
    """A process that has a model loaded and computes on request."""

    def __init__(self, command: Sequence[str], order: dict[str, Any], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.loaded: dict[str, Any] = self._ask(order)

    def run(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        """`times` of every prompt's tokens since the batch was begun, the first prompt's `tokens`, `peak_bytes`."""
        return self._ask({"prompts": prompts, "count": count})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Raises Failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(HANGS_S, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        found: dict[str, Any] = json.loads(line) if line else {"error": f"ended with code {self._process.wait()}"}
        if "error" in found:
            self.close()
            raise Failed(found["error"])
        return found

    def close(self) -> None:
        """Let it end by itself; it must not outlive us."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]


@dataclass
class Bench:
    """What every part works with."""

    state: State
    size: Size
    report: Report
    files: Files
    peers: Peers
    threads: int
    repeats: int
    names: tuple[str, ...]  # of the peers that are asked for, ours among them
    patience_s: float  # how long to wait for a quiet machine, before each measurement
    absent: dict[str, str] = field(default_factory=dict)  # system -> why
    _workers: dict[tuple[str, str, Room], Worker] = field(default_factory=dict)

    def chosen(self, names: Sequence[str]) -> list[System]:
        """Of these systems those whose peer is asked for and has not failed yet."""
        found = [SYSTEMS[name] for name in names]
        return [system for system in found if system.peer in self.names and system.name not in self.absent]

    def each(
        self,
        part: str,
        names: Sequence[str],
        work: Callable[[System, int], Any],
        *,
        repeats: int | None = None,
        limits: bool = False,
    ) -> None:
        """`work(system, repeat)` in turns, A B C A B C; results go to `PART SYSTEM REPEAT`.

        With `limits`, the machine's are measured at the beginning of each repeat. A system that breaks down is left
        out from then on, and the reason is told.
        """
        for repeat in range(self.repeats if repeats is None else repeats):
            if limits:
                self.limits(part, repeat)
            for system in self.chosen(names):
                self.measured(f"{part} {system.name} {repeat}", partial(work, system, repeat), system.name)

    def measured(self, key: str, work: Callable[[], Any], system: str) -> Any:
        """The result under this key, measured now if there is none; None when the system broke down."""
        found = self.state.get(key)
        if found is not None or system in self.absent:
            return found
        try:
            begin_s = time.perf_counter()
            found = work()
            print(f"  {key}: {time.perf_counter() - begin_s:.1f} s", file=sys.stderr, flush=True)
        except (Absent, Failed, OSError, SystemExit) as error:  # SystemExit: a server did not come up
            self.absent[system] = str(error)
            self.report.note(f"ABSENT: {system}", f"{key}: {error}")
            return None
        return self.state.put(key, found)

    def values(self, part: str, system: str) -> list[Any]:
        """What is kept of a system's repeats."""
        found = (self.state.get(f"{part} {system} {repeat}") for repeat in range(max(self.repeats, 99)))
        return [value for value in found if value is not None]

    def limits(self, part: str, repeat: int) -> Limits:
        """The machine's limits, measured beside a repeat of a part."""

        def work() -> dict[str, float]:
            self.quiet()
            return dataclasses.asdict(limits_now(self.threads, None, quick=True))

        return Limits(**self.measured(f"limits {part} {repeat}", work, "limits"))

    # Workers and servers

    def worker(self, system: System, shape: Shape, room: Room) -> Worker:
        """A loaded one, kept for the next repeat. Raises Absent and Failed."""
        key = (system.name, shape.name, room)
        if key not in self._workers:
            self._make_way(shape)
            self._workers[key] = self.start(system, shape, room)
        worker = self._workers.pop(key)
        self._workers[key] = worker  # the last one is the one used last
        return worker

    def start(self, system: System, shape: Shape, room: Room) -> Worker:
        """A new one, which the caller closes. Raises Absent and Failed."""
        command = system.worker(self.peers)  # before gigabytes are written for a peer that is not there
        order = system.order(self.files, shape, room, self.threads)
        return Worker(command, order, self.peers.env(system.peer, self.threads, order["kv_gib"]))

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop(next(iter(self._workers))).close()

    def _make_way(self, shape: Shape) -> None:
        """End those that were not used for longest until another one in float32 has room."""
        need = 2.5 * shape.weight_bytes("float32") + 2**30
        while self._workers and available_bytes() < need:
            self._workers.pop(next(iter(self._workers))).close()

    @contextlib.contextmanager
    def serving(self, system: System, shape: Shape, room: Room, extra: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
        """(URL, process id) of a server that is ready. Raises Absent, and SystemExit when it does not start."""
        self._make_way(shape)
        command, ready = system.serve(self.peers, self.files, shape, room, self.threads, extra=extra)
        env = self.peers.env(system.peer, self.threads, room.kv_gib(shape))
        if not system.ours:
            env.setdefault("PYTHONWARNINGS", "ignore")
        with running(command, ready=ready, env=env, start_s=START_S) as (url, process):
            yield url, process.pid

    # Before each measurement

    def quiet(self) -> float:
        """Wait until the machine has nothing else to do, or for as long as we have patience; the share that is busy."""
        until_s, begin_s = time.monotonic() + self.patience_s, time.monotonic()
        while (busy := busy_share(LOOK_S)) > QUIET and time.monotonic() < until_s:
            pass
        waited_s = time.monotonic() - begin_s
        if busy > QUIET or waited_s > 2 * LOOK_S:
            print(f"  waited {waited_s:.1f} s; {busy:.0%} of the cores are busy", file=sys.stderr, flush=True)
        return busy


def prompts(seed: str, count: int, length: int) -> list[list[int]]:
    """Random ones, which no cache of prefixes knows."""
    rng = random.Random(seed)
    return [rng.choices(PLAIN, k=length) for _ in range(count)]


def limits_now(threads: int, report: Report | None, *, quick: bool) -> Limits:
    """The machine's limits as they are now."""
    torch.set_num_threads(threads)
    if unavailable() is None:
        native().set_threads(threads)
    with torch.inference_mode():
        return measure_limits(report, Clock(threads, quick=quick))


def busy_share(seconds: float) -> float:
    """Of all cores' time, that which anybody uses while we sleep."""

    def read() -> tuple[int, int]:
        fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    before, idle_before = read()
    time.sleep(seconds)
    after, idle_after = read()
    return 1.0 - (idle_after - idle_before) / max(1, after - before)


def available_bytes() -> int:
    """Memory that a new process can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def decode_rate(times: list[list[float]]) -> float:
    """Tokens a second of all streams together, while all of them decode."""
    start_s, end_s = max(one[0] for one in times), min(one[-1] for one in times)
    tokens = sum(start_s < at <= end_s for one in times for at in one)
    return tokens / (end_s - start_s)
