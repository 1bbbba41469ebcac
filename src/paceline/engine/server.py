"""The engine process at work: commands are taken between two steps, every step sends one message.

One thread does everything. While a step computes, commands wait in the socket; they are all taken before the next
plan. An idle engine sleeps in the socket and wakes once in `HEARTBEAT_S` to say that it is alive.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import msgspec
import zmq

from paceline import errors
from paceline.core.protocols import Backend
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, Finish, FinishReason, Rejected
from paceline.engine.loop import EngineLoop, StepFailed, one_line
from paceline.engine.messages import (
    Alive,
    Answers,
    Bye,
    Cancel,
    Command,
    EngineInfo,
    Failed,
    Hello,
    Ready,
    Report,
    Stage,
    Start,
    StepDone,
    Stop,
    Stopped,
    Submit,
    decode_command,
    encode,
    has_message,
)
from paceline.errors import ConfigError, PacelineError

log = logging.getLogger("paceline.engine")

HEARTBEAT_S = 1.0
_LAST_WORDS_S = 5.0  # how long a dying engine waits until its parent has heard why
_MOST_STALL_WAIT_MS = 50
_PROGRESS_EVERY_S = 0.1


class StageReporter:
    """What a factory calls as it goes: `report_stage("read weights")` begins a stage and ends the one before.

    Called again with the name of the running stage and a fraction (0 to 1), it tells progress. Any thread may call it.
    """

    def __init__(self, tell: Callable[[Stage], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()  # the socket below is not thread-safe
        self._name: str | None = None
        self._began = 0.0
        self._told = 0.0
        self._done: list[Stage] = []

    def __call__(self, name: str, fraction: float | None = None) -> None:
        with self._lock:
            now = time.monotonic()
            if name != self._name:
                self._end(now)
                self._name, self._began = name, now
            elif now - self._told < _PROGRESS_EVERY_S:
                return
            self._told = now
            self._tell(Stage(name, None, fraction))

    def finish(self) -> tuple[Stage, ...]:
        """End the last stage; all of them with their seconds."""
        with self._lock:
            self._end(time.monotonic())
            return tuple(self._done)

    def _end(self, now: float) -> None:
        if self._name is not None:
            self._done.append(Stage(self._name, now - self._began))
            self._tell(self._done[-1])
            self._name = None


class EngineParts(NamedTuple):
    """What a factory returns (a plain tuple does too)."""

    scheduler: Scheduler
    backend: Backend
    info: EngineInfo


EngineFactory = Callable[[dict[str, Any], StageReporter], EngineParts | tuple[Scheduler, Backend, EngineInfo]]


class Link:
    """The engine's end of the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, report: Report) -> None:
        """Never blocks: the queue is unbounded, and what can be in it is bounded by the live requests' max_tokens."""
        self._socket.send(encode(report))

    def wait(self, timeout_ms: int | None) -> bool:
        """Whether a command is there within `timeout_ms` (None: wait for ever)."""
        return has_message(self._socket) or (timeout_ms != 0 and bool(self._socket.poll(timeout_ms)))

    def pending(self) -> Iterator[Command]:
        """The commands that are there now."""
        while has_message(self._socket):
            yield decode_command(self._socket.recv(zmq.NOBLOCK))

    def last_words(self, report: Stopped | Failed) -> None:
        """Say why the process ends, and wait a little until the parent has heard it."""
        self.send(report)
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0 and self.wait(int(left * 1000) + 1):
            if any(isinstance(command, Bye) for command in self.pending()):
                return


class EngineServer:
    """Turns an engine loop between commands and reports until it is told to stop."""

    def __init__(self, loop: EngineLoop, link: Link) -> None:
        self._loop = loop
        self._link = link
        self._checked_steps = 0

    def run(self) -> None:
        """Returns after Stop. Raises when the engine cannot go on; finishes have been reported then."""
        while self._take_commands():
            try:
                events = self._loop.step()
            except StepFailed as error:
                self._link.send(StepDone(error.events, self._loop.stats(of_step=True)))
                raise
            if events is not None:
                self._link.send(StepDone(events, self._loop.stats(of_step=True)))

    def _take_commands(self) -> bool:
        """Take all commands that wait, or sleep until one comes; False once told to stop."""
        if not self._link.wait(self._patience_ms()):
            if not self._loop.has_work:
                self._idle()
            return True
        accepted: list[Accepted] = []
        rejected: list[Rejected] = []
        finished: list[Finish] = []
        stop = False
        for command in self._link.pending():
            match command:
                case Submit(spec):
                    answer = self._loop.submit(spec)
                    if isinstance(answer, Accepted):
                        accepted.append(answer)
                    else:
                        rejected.append(answer)
                case Cancel(request_id, reason):
                    finished += self._end((request_id,), reason)
                case Stop():
                    stop = True
        if stop:
            finished += self._end(self._loop.live, FinishReason.ABORT)
        if accepted or rejected or finished:
            self._link.send(Answers(tuple(accepted), tuple(rejected), tuple(finished)))
        return not stop

    def _idle(self) -> None:
        """Say that we live; after some work, use the pause to check that no block was lost."""
        stats = self._loop.stats()
        self._link.send(Alive(stats))
        if stats.steps == self._checked_steps:
            return
        self._checked_steps = stats.steps
        try:
            self._loop.scheduler.check_integrity()
        except AssertionError:
            log.critical("the scheduler's accounting is wrong: this is a bug\n%s", self._loop.dump(), exc_info=True)

    def _end(self, request_ids: tuple[str, ...], reason: FinishReason) -> list[Finish]:
        ends = [self._loop.cancel(request_id, reason) for request_id in request_ids]
        return [finish for finish in ends if finish is not None]

    def _patience_ms(self) -> int:
        """How long to wait for commands: not at all with work to do, a little while stalled, long when idle."""
        if not self._loop.has_work:
            return int(HEARTBEAT_S * 1000)
        if (rest_s := self._loop.rest_s) is not None:
            return min(int(rest_s * 1000) + 1, int(HEARTBEAT_S * 1000))
        stalled = self._loop.stalled_polls
        return min(1 << stalled, _MOST_STALL_WAIT_MS) if stalled else 0


def serve(endpoint: str, on_connected: Callable[[], None]) -> int:
    """Connect to the parent, build the engine it asks for and serve until told to stop; the exit code."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, int(_LAST_WORDS_S * 1000))
    socket.connect(endpoint)
    link = Link(socket)
    try:
        link.send(Hello(os.getpid()))
        on_connected()
        _serve(link)
    except PacelineError as error:  # expected, and the parent tells people
        link.last_words(Failed(_public_kind(error), str(error)))
        return 1
    except Exception as error:
        log.exception("the engine failed")
        link.last_words(Failed("", one_line(error)))
        return 1
    else:
        link.last_words(Stopped())
        return 0
    finally:
        socket.close()
        context.term()


def _serve(link: Link) -> None:
    link.wait(None)
    start = next(link.pending())
    assert isinstance(start, Start), f"the first command is Start, not {type(start).__name__}"
    report_stage = StageReporter(link.send)
    report_stage("import")
    factory = resolve_factory(start.factory)
    scheduler, backend, info = factory(start.config, report_stage)
    info = msgspec.structs.replace(info, stages=report_stage.finish())
    # What is loaded now stays; later collections need not walk through it in the middle of a step.
    gc.collect()
    gc.freeze()
    link.send(Ready(info))
    EngineServer(EngineLoop(scheduler, backend), link).run()


def resolve_factory(path: str) -> EngineFactory:
    """The function that "package.module:function" names. Raises ConfigError if there is none."""
    module_name, _, function_name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"engine factory {path!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"engine factory {path!r} is not callable")
    return cast("EngineFactory", factory)


def _public_kind(error: PacelineError) -> str:
    """The nearest class that the parent knows too."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
