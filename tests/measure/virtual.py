"""Our client on a clock of its own: the real HTTP, SSE and record code, exact times, no sockets and no waiting."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from paceline.measure import client as client_module
from paceline.measure import protocol as protocol_module
from paceline.measure.alarm import Alarm
from paceline.measure.client import Client, _Request
from paceline.measure.conformance.pack import endpoint_of, job_of, settings_of
from paceline.measure.conformance.script import Case, play
from paceline.measure.mock import End
from paceline.measure.protocol import Connection, Turn
from paceline.measure.records import RequestRecord

SHRED = (-1, -1, -1)  # as a cut: every byte in a read of its own


class _Transport:
    """Takes what the client writes and throws it away."""

    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Any) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class _NoTurn:
    """Parsing is asked for by the driver."""

    def add(self, connection: Connection) -> None: ...


class World:
    """A heap of (time, action): network, alarms and deadlines of one client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        for module in (client_module, protocol_module):
            monkeypatch.setattr(module, "clock", lambda: self.now)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._counter), action))

    def run(self) -> None:
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def reset(self) -> None:
        self.now = 0.0
        self._heap.clear()


def wire(case: Case) -> list[list[tuple[float, bytes]]]:
    """Per answer: what the mock writes, and when."""
    return [list(play(answer).steps) for answer in case.answers]


class VirtualClient(Client):
    """The client whose connections are played by the driver. Needs a running loop for its constructor alone."""

    def __init__(self, world: World, case: Case) -> None:
        super().__init__(endpoint_of(1, case), settings_of(case), cast("Alarm", world))
        self._world = world
        self._case = case
        self._answers = wire(case)
        self._attempt = 0
        self.cut: tuple[int, int, int] | None = None  # (answer, step, byte)

    def give_connection(self, request: _Request) -> None:
        number = min(self._attempt, len(self._answers) - 1)
        self._attempt += 1
        answer, steps = self._case.answers[number], self._answers[number]
        connection = Connection(cast("Turn", _NoTurn()))
        connection.connection_made(cast("Any", _Transport()))
        request.attempt(connection)
        start = self._world.now
        for i, (offset, data) in enumerate(steps):
            pieces = [data]
            if self.cut == SHRED:
                pieces = [data[k : k + 1] for k in range(len(data))]
            elif self.cut is not None and self.cut[:2] == (number, i):
                pieces = [data[: self.cut[2]], data[self.cut[2] :]]
            self._world.at(start + offset, lambda pieces=pieces: _deliver(connection, pieces))  # type: ignore[misc]
        last = answer.end_ms / 1e3 if answer.end_ms is not None else (steps[-1][0] if steps else 0.0)
        if answer.end is End.FIN:
            self._world.at(start + last, lambda: _end(connection, None))
        elif answer.end is End.RESET:
            self._world.at(start + last, lambda: _end(connection, ConnectionResetError(104, "reset")))


def _deliver(connection: Connection, pieces: list[bytes]) -> None:
    for piece in pieces:
        if piece and not connection.closed:
            connection.data_received(piece)
            connection.parse()


def _end(connection: Connection, error: Exception | None) -> None:
    if not connection.closed:
        connection.eof_received() if error is None else connection.connection_lost(error)
        connection.parse()


def play_case(world: World, case: Case, cut: tuple[int, int, int] | None = None) -> RequestRecord:
    """The record of one case, exact to the rounding of records. `cut`: split that write into two reads of one time."""
    world.reset()
    client = VirtualClient(world, case)
    client.cut = cut
    records: list[RequestRecord] = []
    request = _Request(client, job_of(case), records.append)
    client._start(request)
    if request._deadline is not None:
        request._deadline.cancel()
    if not records:
        world.at(client.settings.timeout_s, lambda: None if request.over else request._expire())
    world.run()
    assert len(records) == 1, "exactly one record"
    return records[0]
