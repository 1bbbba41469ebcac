"""Who may write into a run folder: one runner, and one worker a file.

The locks are the kernel's, so a process that is killed leaves none behind. Where there are none (Windows, some network
file systems) nothing is locked, and a folder that holds a run is refused all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import ConfigError

try:
    import fcntl
except ImportError:  # no such thing on Windows
    fcntl = None  # type: ignore[assignment]

WAIT_S = 10.0  # for the workers of a runner that was killed: they stop when their input ends
_POLL_S = 0.02


def lock(fd: int) -> bool:
    """Take the lock of an open file or folder until it is closed; False: somebody else has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Be the one runner of a folder that exists. Raises ConfigError when another one is at work in it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if not lock(fd):
            raise ConfigError(f"another run is being written into {folder}; wait for its end or choose another folder")
        yield
    finally:
        os.close(fd)


def await_writers(files: Iterable[Path]) -> None:
    """Wait until nobody writes these files any more. Raises ConfigError when that does not end."""
    deadline = time.monotonic() + WAIT_S
    for path in files:
        with path.open("rb") as file:
            while not lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise ConfigError(f"a process still writes {path}; wait for its end")
                time.sleep(_POLL_S)
