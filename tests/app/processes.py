"""The `paceline` command as a person runs it: a process, its output, its exit code."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PACELINE = (sys.executable, "-c", "from paceline.app.cli import main; main()")
START_S = 120.0  # importing torch on a busy machine takes its time


def environment(**more: str) -> dict[str, str]:
    """Ours without any PACELINE_* of the person who runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}


def run(
    *arguments: str, given: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end with `given` on standard input."""
    return subprocess.run(
        [*PACELINE, *arguments],
        input=given,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**(env or {})),
        timeout=START_S,
    )


class Running:
    """A process whose output is collected line by line while it runs."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*PACELINE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**(env or {})),
            start_new_session=True,
        )
        self.lines: dict[str, list[str]] = {"out": [], "err": []}
        self._fresh: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._collect, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.lines[name].append(line.rstrip("\n"))
                self._fresh.put(None)
        self._fresh.put(None)

    @property
    def out(self) -> str:
        return "\n".join(self.lines["out"])

    @property
    def err(self) -> str:
        return "\n".join(self.lines["err"])

    def wait_for(self, text: str, *, within_s: float = START_S) -> str:
        """The first line on either stream that holds `text`."""
        deadline = time.monotonic() + within_s
        while True:
            found = next((line for lines in self.lines.values() for line in lines if text in line), None)
            if found is not None:
                return found
            ended = self.process.poll() is not None and not any(thread.is_alive() for thread in self._threads)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come; exit {self.process.poll()}\n{self.out}\n{self.err}")
            try:
                self._fresh.get(timeout=0.2)
            except queue.Empty:
                continue

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 60.0) -> int:
        """The exit code, with all output collected."""
        code = self.process.wait(within_s)
        for thread in self._threads:
            thread.join(within_s)
        return code


@contextmanager
def running(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """A process that is gone, with its children, when the block ends."""
    one = Running(arguments, env)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
        one.wait()
