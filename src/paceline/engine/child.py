"""First instructions of the engine process: `python -m paceline.engine.child ENDPOINT PARENT_PID PYTHONPATH`.

Signals come first and heavy imports last, so that a Ctrl-C during start-up does not reach the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ignore_stop_signals() -> None:
    """Whether and when the engine stops is the parent's decision.

    Ctrl-C reaches the whole terminal group, and systemd or a container runtime sends SIGTERM to every process: an
    engine that obeyed them would end the requests its server is draining.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def take_lifeline() -> int:
    """The read end of a pipe that the parent holds open as long as it lives; it came as stdin.

    It moves to a descriptor of its own, and stdin becomes empty, so that nobody reads it by accident.
    """
    lifeline = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return lifeline


def watch_lifeline(lifeline: int, on_parted: Callable[[], None]) -> threading.Thread:
    """Call `on_parted` from a thread of its own when the parent's end of the pipe closes, however that came about."""

    def watch() -> None:
        while os.read(lifeline, 64):
            pass
        on_parted()

    thread = threading.Thread(target=watch, name="paceline-lifeline", daemon=True)
    thread.start()
    return thread


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux).

    The lifeline does the same everywhere, but needs the interpreter lock, which a native call may hold for long. The
    kernel means the parent's *thread* that started us: the one with its event loop, which must not end before us.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        return  # the lifeline remains
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def remove_socket(endpoint: str) -> None:
    """Clear away what a parent that died early could not."""
    path = endpoint.removeprefix("ipc://")
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def main(argv: list[str]) -> int:
    """Run an engine process to its end; its exit code."""
    ignore_stop_signals()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows where a hung engine is
    endpoint, parent_pid, python_path = argv[0], int(argv[1]), argv[2]
    os.environ["PYTHONPATH"] = python_path  # ours was the parent's sys.path, and is read already
    if not python_path:
        del os.environ["PYTHONPATH"]

    def parted() -> None:
        remove_socket(endpoint)
        os._exit(1)  # nobody is left to tell anything

    watch_lifeline(take_lifeline(), parted)
    from paceline.engine.server import serve

    return serve(endpoint, lambda: die_with_parent(parent_pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
