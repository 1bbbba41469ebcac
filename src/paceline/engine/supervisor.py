"""Keeps an engine process alive: one life after another, each an `EngineProcess`.

starting ──► ready ──► draining ──► dead
   ▲  │        │ │                   ▲
   │  └────────│─│───────────────────┤
   └───────────┘ └───────────────────┘
  restart after a death      no restart, or given up
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from paceline.engine.messages import Command, EngineInfo, Ready, Report, Stage, Stop, Stopped
from paceline.engine.process import EngineLaunch, EngineProcess
from paceline.errors import EngineDead, EngineNotReady, PacelineError

log = logging.getLogger("paceline.engine")


class EngineState(StrEnum):
    """Where an engine stands."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what runs, takes nothing new
    DEAD = "dead"  # for good


_NEXT = {
    EngineState.STARTING: (EngineState.READY, EngineState.DEAD),
    EngineState.READY: (EngineState.STARTING, EngineState.DRAINING, EngineState.DEAD),
    EngineState.DRAINING: (EngineState.DEAD,),
    EngineState.DEAD: (),
}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to start an engine anew. A death is quick when the engine was not ready for `quick_s` seconds before it."""

    most_quick_deaths: int = 5  # in a row; one more and we give up
    quick_s: float = 30.0
    backoff_s: float = 0.1  # before the restart after the first quick death; doubles with each further one
    most_backoff_s: float = 10.0

    def delay_s(self, quick_deaths: int) -> float:
        """Seconds to wait after so many quick deaths in a row."""
        return min(self.backoff_s * 2.0 ** (quick_deaths - 1), self.most_backoff_s) if quick_deaths else 0.0


class Supervisor:
    """Starts, restarts and stops an engine. Belongs to the event loop it is started in.

    `on_report` gets the reports of a ready engine; `on_death` is called once for each death, after the last report of
    that life; `on_state` and `on_stage` are for people.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        restart: RestartPolicy | None,
        *,
        on_report: Callable[[Report], None],
        on_death: Callable[[PacelineError], None],
        on_state: Callable[[EngineState], None],
        on_stage: Callable[[Stage], None],
    ) -> None:
        self._launch = launch
        self._restart = restart
        self._on_report = on_report
        self._on_death = on_death
        self._on_state = on_state
        self._on_stage = on_stage
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.last_report_s: float | None = None  # on the event loop's clock
        self._ready_s: float | None = None  # when the current life became ready
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[PacelineError | None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._closing = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the living process."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises what its factory raised, if a PacelineError.

        A first start that fails is not repeated: what is wrong then is wrong again. If cancelled, the engine is killed.
        """
        if self._task is not None or self.state is EngineState.DEAD:
            raise RuntimeError("an engine is started once")
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._started.add_done_callback(lambda future: future.exception())  # whether or not somebody still waits
        self._task = loop.create_task(self._run(), name="paceline-engine-supervisor")
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            self._closing.set()
            self._kill("its start was given up")
            raise

    def send(self, command: Command) -> None:
        """To the living process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def begin_draining(self) -> None:
        """From now on the engine's end is wanted: no restart."""
        if self.state is EngineState.READY:
            self._become(EngineState.DRAINING)

    async def close(self, timeout_s: float) -> None:
        """Stop the engine: told to first, killed after `timeout_s` seconds or when it is not ready. Idempotent."""
        self._closing.set()
        if self._task is None:
            if self.state is not EngineState.DEAD:
                self._become(EngineState.DEAD)
            return
        self.begin_draining()
        if self.state is EngineState.DRAINING:
            self.send(Stop())
        else:
            self._kill("it was stopped while it was starting")
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            self._kill(f"it did not stop within {timeout_s:g} s")
        await asyncio.shield(self._task)

    async def wait_dead(self) -> PacelineError | None:
        """Wait until the engine is dead for good; why, or None if it was stopped. Only after `start`."""
        if self._task is None:
            return None
        return await asyncio.shield(self._task)

    async def _run(self) -> PacelineError | None:
        death: PacelineError | None = None
        try:
            death = await self._live_again_and_again()
        finally:
            self._become(EngineState.DEAD)
            assert self._started is not None
            if not self._started.done():
                self._started.set_exception(death or EngineNotReady("the engine was stopped while it was starting"))
        if death is not None and self.info is not None:  # before that, `start` tells it
            log.error("%s", death)
        return death

    async def _live_again_and_again(self) -> PacelineError | None:
        """Lives until one is the last; why it ended (None: as told)."""
        quick_deaths = 0
        while True:
            death, lived_s = await self._live()
            wanted = self.state in (EngineState.READY, EngineState.STARTING) and not self._closing.is_set()
            if not wanted or self._restart is None or self.info is None:
                return death
            quick_deaths = quick_deaths + 1 if lived_s < self._restart.quick_s else 0
            if quick_deaths > self._restart.most_quick_deaths:
                return EngineDead(f"{death}; given up after {quick_deaths} quick deaths in a row")
            log.warning("%s; starting it anew", death)
            if self.state is EngineState.READY:
                self._become(EngineState.STARTING)
            if await self._closed_within(self._restart.delay_s(quick_deaths)):
                return None
            self.restarts += 1

    async def _live(self) -> tuple[PacelineError | None, float]:
        """One life: why it ended (None: as told) and for how many seconds it had been ready."""
        self._ready_s = None
        try:
            self._process = process = EngineProcess(self._launch, self._hear)
        except PacelineError as error:
            self._on_death(error)
            return error, 0.0
        try:
            await asyncio.shield(process.ended)  # a cancelled wait must not end what it waits for
        except BaseException:  # the event loop is shutting down without a close()
            process.destroy()
            raise
        finally:
            self._process = None
        lived_s = asyncio.get_running_loop().time() - self._ready_s if self._ready_s is not None else 0.0
        if self._closing.is_set() and (isinstance(process.last_words, Stopped) or self._ready_s is None):
            return None, lived_s
        death = process.death()
        self._on_death(death)
        return death, lived_s

    def _hear(self, report: Report) -> None:
        self.last_report_s = asyncio.get_running_loop().time()
        match report:
            case Stage():
                self._on_stage(report)
            case Ready(info):
                self._ready_s = self.last_report_s
                self.info = info
                if not self._closing.is_set():
                    self._become(EngineState.READY)
                    if self._started is not None and not self._started.done():
                        self._started.set_result(info)
            case _:
                self._on_report(report)

    def _become(self, state: EngineState) -> None:
        assert state in _NEXT[self.state], f"an engine does not go from {self.state} to {state}"
        self.state = state
        self._on_state(state)

    def _kill(self, why: str) -> None:
        if self._process is not None:
            self._process.kill(why)

    async def _closed_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True
