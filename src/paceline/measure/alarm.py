"""Callbacks at absolute times, to about a tenth of a millisecond.

Event loops round their timers up to whole milliseconds (epoll's unit), which would make every request about half a
millisecond late. On Linux a timer file descriptor wakes the loop on time; elsewhere the loop's own timer does.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import math
import os
import sys
import time
from collections.abc import Callable

# One clock for everything: monotonic, system-wide, the same in every process of this machine.
clock = time.perf_counter

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A heap of (time, callback) that the running event loop serves. Equal times keep their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._armed: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
            if self._fd >= 0:
                loop.add_reader(self._fd, self._ring)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call `callback` at clock() == `when`, or as soon as the loop can if that is past."""
        heapq.heappush(self._heap, (when, next(self._counter), callback))
        if self._armed is None or when < self._armed:
            self._arm(when)

    def close(self) -> None:
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, when: float) -> None:
        self._armed = when
        if self._fd >= 0:
            # An all-zero value would disarm it; a time long past rings at once.
            seconds = max(when, 1e-6)
            value = _Timespec(int(seconds), int((seconds % 1.0) * 1e9))
            spec = _Itimerspec(_Timespec(0, 0), value)
            self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0.0, when - clock()), self._ring)

    def _ring(self) -> None:
        if self._fd >= 0:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                return  # re-armed meanwhile
        self._armed = -math.inf  # what the callbacks set is armed once, after all of them
        heap = self._heap
        try:
            now = clock()
            while heap and heap[0][0] <= now:
                heapq.heappop(heap)[2]()
        finally:  # a callback that raises must not silence the others
            self._armed = None
            if heap:
                self._arm(heap[0][0])
