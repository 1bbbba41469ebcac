"""Starts the worker processes of one segment, lets them go together and listens to them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paceline.errors import PacelineError
from paceline.measure.alarm import clock
from paceline.measure.jobs import Said, WorkerJob
from paceline.measure.records import ErrorClass

LEAD_S = 0.2  # between "go" and t0, so that every worker has heard it
PREPARE_TIMEOUT_S = 600.0  # building the prompts of a long trace takes a while
STOP_TIMEOUT_S = 10.0


class LoadFailed(PacelineError):
    """The load could not be started or carried to its end. `error` tells the class where there is one."""

    def __init__(self, message: str, error: ErrorClass | None = None) -> None:
        super().__init__(message)
        self.error = error


class Stopped(LoadFailed):
    """The user stopped it before any load began."""


@dataclass(slots=True)
class _Process:
    job: WorkerJob
    process: asyncio.subprocess.Process
    ready: asyncio.Future[None]
    reader: asyncio.Task[None] | None = None
    ended: bool = False


class Fleet:
    """The workers of one segment. `heard` gets every progress line.

    Use: `await start(jobs)`, `go(first_s)`, `await wait()`; `stop()` at any time; `await close()` always.
    """

    def __init__(self, heard: Callable[[Said], None]) -> None:
        self._heard = heard
        self._processes: list[_Process] = []
        self.t0 = 0.0
        self.connections = 0

    async def start(self, jobs: list[WorkerJob]) -> None:
        """Start all and wait until each has its prompts and connections. Raises LoadFailed."""
        loop = asyncio.get_running_loop()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for job in jobs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "paceline.measure.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the runner alone, which says stop
                limit=1 << 24,
                env=environment,
            )
            entry = _Process(job, process, loop.create_future())
            self._processes.append(entry)
            self._send(entry, msgspec.json.encode(job) + b"\n")
            entry.reader = loop.create_task(self._listen(entry))
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                await asyncio.gather(*(entry.ready for entry in self._processes))
        except TimeoutError:
            raise LoadFailed(f"the workers were not ready within {PREPARE_TIMEOUT_S:g} s") from None

    def go(self, first_s: float = 0.0) -> float:
        """Let the load begin: t0 such that the axis stands at `first_s` in a moment. Returns t0 on the clock."""
        self.t0 = clock() + LEAD_S - first_s
        for entry in self._processes:
            self._send(entry, f"go {self.t0!r}\n".encode())
        return self.t0

    async def wait(self) -> None:
        """Until every worker has ended. Raises LoadFailed when one died; the others are stopped then."""
        readers = [entry.reader for entry in self._processes if entry.reader is not None]
        try:
            await asyncio.gather(*readers)
        except LoadFailed:
            self.stop()
            await asyncio.wait(readers, timeout=STOP_TIMEOUT_S)
            raise

    def stop(self) -> None:
        """Ask all to end now; they record what runs as cancelled."""
        for entry in self._processes:
            if not entry.ended:
                self._send(entry, b"stop\n")

    async def close(self) -> None:
        """Leave no process behind."""
        for entry in self._processes:
            stdin = entry.process.stdin
            if stdin is not None:
                stdin.close()  # a worker takes the end of its input as stop
        for entry in self._processes:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await entry.process.wait()
            except TimeoutError:
                entry.process.kill()
                await entry.process.wait()
            if entry.reader is not None:
                entry.reader.cancel()
                await asyncio.gather(entry.reader, return_exceptions=True)
            if entry.ready.done() and not entry.ready.cancelled():
                entry.ready.exception()

    def _send(self, entry: _Process, data: bytes) -> None:
        assert entry.process.stdin is not None
        if not entry.process.stdin.is_closing():
            entry.process.stdin.write(data)

    async def _listen(self, entry: _Process) -> None:
        """Until this worker ends."""
        stdout = entry.process.stdout
        assert stdout is not None
        decoder = msgspec.json.Decoder(Said)
        while line := await stdout.readline():
            said = decoder.decode(line)
            if said.kind == "ready":
                self.connections += said.connections
                entry.ready.set_result(None)
            elif said.kind == "error":
                failure = LoadFailed(said.message, said.error)
                if entry.ready.done():
                    raise failure
                entry.ended = True
                entry.ready.set_exception(failure)
                return
            elif said.kind == "end":
                entry.ended = True
                return
            else:
                self._heard(said)
        code = await entry.process.wait()
        failure = LoadFailed(f"worker {entry.job.worker} ended unexpectedly with code {code}")
        if not entry.ready.done():
            entry.ready.set_exception(failure)
            return
        raise failure
