"""The parent's hold on one engine process: start it, talk to it, notice its death at once.

folder (0700) ── socket        made for this process, removed as soon as it has connected
pipe           ── its stdin    open as long as we live; when it closes, the engine ends itself
thread         ── waitpid      returns when the process is gone, whatever killed it; before that, /proc tells that it
                               is going: the kernel takes a second for each few GiB that it has to take back first
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from paceline import errors
from paceline.engine.messages import (
    Bye,
    Command,
    Failed,
    Hello,
    Report,
    Start,
    Stopped,
    decode_report,
    encode,
    has_message,
)
from paceline.errors import ConfigError, EngineDead, PacelineError

log = logging.getLogger("paceline.engine")

_MOST_PATH_BYTES = 100  # of a Unix socket's path; the kernel takes 107, macOS 103
_GLANCE_S = 0.1  # how often a living process is looked at
_PF_EXITING = 0x4  # in linux/sched.h
_READ_BURST = 64  # reports handled before the event loop gets a turn


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """How to make an engine: `factory` is "package.module:function", called as factory(config, report_stage)."""

    factory: str
    config: Mapping[str, Any] = field(default_factory=dict)  # of values that msgspec encodes
    socket_dir: Path | None = None  # where the socket's folder is made; None: the system's temporary folder


class EngineProcess:
    """One life of an engine process, from start to death.

    Belongs to the event loop it was made in. `on_report` gets every report but Hello, on that loop. `ended` completes
    with the exit code (negative: minus the signal) after the last report has been handled.
    """

    def __init__(self, launch: EngineLaunch, on_report: Callable[[Report], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = _encode_start(launch)
        self._on_report = on_report
        self.last_words: Failed | Stopped | None = None
        self._killed_because: str | None = None
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.folder = _make_folder(launch.socket_dir)
        endpoint = f"ipc://{self.folder}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.bind(endpoint)
            # From the event loop's own thread, which lives as long as we do: see child.die_with_parent.
            self._popen = _spawn(endpoint)
        except BaseException:
            self._close_socket()
            raise
        self._loop.add_reader(self._socket.fileno(), self._read)
        threading.Thread(target=self._wait, name="paceline-engine-wait", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    def send(self, command: Command) -> None:
        """Never blocks. To a dead process: nothing happens, `ended` tells."""
        self._send(encode(command))

    def _send(self, frame: bytes) -> None:
        if not self._socket.closed:
            # Once the peer is gone a socket has nowhere to put a message, and sending would wait for ever.
            with contextlib.suppress(zmq.Again):
                self._socket.send(frame, zmq.NOBLOCK)
            # The socket's descriptor signals edges, and sending may have used one up: look again.
            self._loop.call_soon(self._read)

    def kill(self, why: str) -> None:
        """SIGKILL; `ended` follows. `why` ends "the engine process was killed: "."""
        self._killed_because = why
        self._popen.kill()

    def destroy(self) -> None:
        """Kill and clean up without the event loop's help, for a loop that is shutting down."""
        self._popen.kill()
        self._on_exit(self._popen.wait())

    def death(self) -> PacelineError:
        """Why it ended, once `ended` is done: the error of its last words, or EngineDead with the signal or code."""
        words = self.last_words
        if self._killed_because is not None:
            return EngineDead(f"the engine process was killed: {self._killed_because}")
        if not isinstance(words, Failed):
            return EngineDead(f"the engine process {describe_exit(self.ended.result())}")
        known = getattr(errors, words.kind, None) if words.kind else None
        if known is not None and issubclass(known, errors.ConfigError | errors.ModelError):
            return known(words.message)  # type: ignore[no-any-return]  # a class of errors.py, looked up by name
        return EngineDead(f"the engine process failed: {words.message}")

    def _read(self) -> None:
        for _ in range(_READ_BURST):
            if self._socket.closed or not has_message(self._socket):
                return
            self._handle(self._socket.recv(zmq.NOBLOCK))
        self._loop.call_soon(self._read)

    def _handle(self, frame: bytes) -> None:
        try:
            report = decode_report(frame)
            if isinstance(report, Hello):
                # Connected: the path has served, and what is not there cannot be left behind or be opened.
                shutil.rmtree(self.folder, ignore_errors=True)
                self._send(self._start)
                return
            if isinstance(report, Failed | Stopped):
                self.last_words = report
                self.send(Bye())
            self._on_report(report)
        except Exception:
            # Going on would leave some request waiting for ever.
            log.exception("a report of the engine could not be handled; ending it")
            self.kill("one of its reports could not be handled")

    def _wait(self) -> None:
        code = wait_for_death(self._popen)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_exit, code)
        self._popen.wait()

    def _on_exit(self, code: int) -> None:
        if self.ended.done():
            return
        while not self._socket.closed and self._socket.poll(0):
            self._read()
        self._loop.remove_reader(self._socket.fileno())
        self._close_socket()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self.ended.set_result(code)

    def _close_socket(self) -> None:
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


def _encode_start(launch: EngineLaunch) -> bytes:
    try:
        return encode(Start(launch.factory, dict(launch.config)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the engine's configuration cannot be sent to its process: {error}") from error


def wait_for_death(popen: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended, or is ending and will never run again; its exit code as `Popen` gives it."""
    with _sleep_until_end(popen) as sleep:
        while (code := popen.poll()) is None:
            sleep(_GLANCE_S)
            code = _code_of_dying(popen.pid)
            if code is not None:
                break
    return code


@contextlib.contextmanager
def _sleep_until_end(popen: subprocess.Popen[bytes]) -> Iterator[Callable[[float], None]]:
    """A sleep of so many seconds that the process's end cuts short.

    `Popen.wait` with a timeout looks again and again instead, up to every half millisecond, in a process that has
    tokens to pass on.
    """
    try:
        descriptor = os.pidfd_open(popen.pid)
    except (AttributeError, OSError):  # not Linux, an old one, or one that forbids it
        descriptor = None
    if descriptor is None:

        def sleep(seconds: float) -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(seconds)

        yield sleep
        return
    try:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)

        def sleep_or_hear(seconds: float) -> None:
            ends.poll(seconds * 1000)

        yield sleep_or_hear
    finally:
        os.close(descriptor)


def _code_of_dying(pid: int) -> int | None:
    """The exit code of a process that the kernel is taking apart; None if it runs, or where there is no /proc."""
    try:
        # Fields of proc(5), counted from the one after the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        flags, status = int(fields[6]), int(fields[49])
    except (OSError, IndexError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status) if flags & _PF_EXITING else None


def describe_exit(code: int) -> str:
    """An exit code as `Popen` gives it, for people: "was killed by SIGKILL (...)", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _make_folder(socket_dir: Path | None) -> Path:
    """A fresh folder that only this user can open. Raises ConfigError where a socket cannot be."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=socket_dir))  # mode 0700
    except OSError as error:
        raise ConfigError(f"cannot make a folder for the engine's socket: {error}") from error
    if len(os.fsencode(folder)) + len("/engine") > _MOST_PATH_BYTES:
        folder.rmdir()
        raise ConfigError(
            f"{folder.parent} is too long a path for a socket (over {_MOST_PATH_BYTES} bytes with its name): "
            "choose a shorter folder, for instance by TMPDIR"
        )
    return folder


def _spawn(endpoint: str) -> subprocess.Popen[bytes]:
    """Start the child. It imports what we can import; its output goes to our stderr, our stdout is for results."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own_path = os.environ.get("PYTHONPATH", "")  # to be put back there, for processes that the child starts
    command = [sys.executable, "-P", "-m", "paceline.engine.child", endpoint, str(os.getpid()), own_path]
    try:
        return subprocess.Popen(  # noqa: S603  # our own module
            command, stdin=subprocess.PIPE, stdout=2, env={**os.environ, "PYTHONPATH": path}
        )
    except OSError as error:
        raise EngineDead(f"the engine process cannot be started: {error}") from error
