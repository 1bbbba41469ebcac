"""Many lines at once: so many in the engine's hands, tenants in turn, and of a tenant the batch that came first."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.serve.batch.ledger import Ledger
from paceline.serve.batch.lines import LineFile
from paceline.serve.batch.runner import Outcome, Runner
from paceline.serve.keys import Caller

log = logging.getLogger("paceline.serve")
_T = TypeVar("_T")
_SYNC_S = 1.0


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """`asyncio.to_thread` that, cancelled, still waits for the thread: whatever it opened can then be closed."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


class Strikes:
    """How often the engine died or failed during each line; with a file, also in the lives of earlier servers."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        known = path.read_text("ascii").split() if path is not None and path.exists() else []
        self._counts = Counter(int(word) for word in known if word.isdecimal())

    def of(self, position: int) -> int:
        return self._counts[position]

    def note(self, position: int) -> None:
        """One more."""
        self._counts[position] += 1
        if self._path is not None:
            with open(self._path, "a", encoding="ascii") as file:
                file.write(f"{position}\n")


class Run:
    """One batch that is being worked off: its lines, its open ledger, and who asked."""

    def __init__(
        self,
        lines: LineFile,
        ledger: Ledger,
        caller: Caller,
        *,
        strikes: Strikes | None = None,
        on_answer: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.lines = lines
        self.ledger = ledger
        self.caller = caller
        self.strikes = strikes or Strikes()
        self.on_answer = on_answer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[None]] = set()
        self._undone = ledger.undone()
        self._handed_out = False
        self.ended.add_done_callback(lambda ended: ended.exception())  # whether or not somebody still waits

    def next(self) -> int | None:
        """The position of the next line to answer; None after the last."""
        position = next(self._undone, None)
        self._handed_out = position is None
        return position

    def expire(self) -> None:
        """Write down that the rest was never answered. Blocks."""
        for position in self.ledger.undone():
            line = self.lines.read(position)
            self.ledger.give_up(position, line, "batch_expired", "the batch's completion window ended before its turn")

    def end_if_through(self) -> None:
        """End it once the last line is answered."""
        if self._handed_out and not self.tasks:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """It is over: all is answered, or `error` keeps it from going on. Only the first call counts."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Crew:
    """Answers the lines of runs, `concurrency` at once. Use as a context; work is done while it is open."""

    def __init__(self, runner: Runner, concurrency: int) -> None:
        self._runner = runner
        self._slots = asyncio.Semaphore(concurrency)
        self._rota: deque[tuple[str, deque[Run]]] = deque()  # tenants, the next one first, each with its runs in order
        self._open: list[Run] = []
        self._added = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crew:
        self._tasks = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._sync())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def work_off(self, run: Run) -> None:
        """Answer every line of a run that has no answer yet. Cancelled, what is in hand is given up, and what is
        written stays. Raises what keeps it from going on: EngineError, OSError."""
        self._open.append(run)
        self._add(run)
        try:
            await asyncio.shield(run.ended)
        finally:
            self._open.remove(run)
            self._remove(run)
            tasks = set(run.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _add(self, run: Run) -> None:
        for tenant, runs in self._rota:
            if tenant == run.caller.tenant:
                runs.append(run)
                break
        else:
            self._rota.append((run.caller.tenant, deque([run])))
        self._added.set()

    def _remove(self, run: Run) -> None:
        for entry in list(self._rota):
            with suppress(ValueError):
                entry[1].remove(run)
            if not entry[1]:
                self._rota.remove(entry)

    def _next(self) -> tuple[Run, int] | None:
        """The next line, of the tenant whose turn it is; None while nobody has one."""
        while self._rota:
            _, runs = self._rota[0]
            run = runs[0]
            position = run.next()
            if position is not None:
                self._rota.rotate(-1)
                return run, position
            runs.popleft()
            if not runs:
                self._rota.popleft()
            run.end_if_through()
        return None

    async def _dispatch(self) -> None:
        while True:
            await self._slots.acquire()
            while (work := self._next()) is None:
                self._added.clear()
                await self._added.wait()
            run, position = work
            task = asyncio.create_task(self._answer(run, position))
            run.tasks.add(task)
            task.add_done_callback(partial(self._note_end, run))

    async def _answer(self, run: Run, position: int) -> None:
        line = await in_thread(run.lines.read, position)
        outcome = await self._runner.answer(
            line, run.caller, run.strikes.of(position), lambda: run.strikes.note(position)
        )
        run.ledger.answer(position, line, outcome.status, outcome.request_id, outcome.body)
        run.on_answer(outcome)

    def _note_end(self, run: Run, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            run.end(error)
        run.end_if_through()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            for run in list(self._open):
                try:
                    await in_thread(run.ledger.sync)
                except OSError as error:
                    run.end(error)
