"""Writes that wait for the end of a turn: in order, none lost, however many connections and however they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.serve.outbox import GatheringTransport, Outbox


class Wire(asyncio.Transport):
    """Keeps what it is given, call by call."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.closing = False
        self._log = log

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.calls.append(bytes(data))
        self._log.append("write")

    def close(self) -> None:
        self.closing = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing


def in_a_turn(count: int, work: Callable[[list[GatheringTransport]], None]) -> tuple[list[Wire], list[str]]:
    """What `work` with so many connections, and a turn of the event loop after it, did to their sockets."""
    log: list[str] = []
    wires = [Wire(log) for _ in range(count)]

    async def run() -> None:
        outbox = Outbox()
        work([GatheringTransport(wire, outbox, asyncio.get_running_loop()) for wire in wires])
        log.append("turn")
        await asyncio.sleep(0)

    asyncio.run(run())
    return wires, log


def test_what_a_turn_writes_goes_out_at_its_end_in_one_call_each() -> None:
    def work(transports: list[GatheringTransport]) -> None:
        for part in (b"one ", b"two "):
            for transport in transports:
                transport.write(part)
        transports[0].writelines([b"and ", bytearray(b"three")])

    wires, log = in_a_turn(3, work)
    assert [wire.calls for wire in wires] == [[b"one two and three"], [b"one two "], [b"one two "]]
    assert log == ["turn", "write", "write", "write"]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 200])
def test_nothing_is_lost_with_many_connections(count: int) -> None:
    def work(transports: list[GatheringTransport]) -> None:
        for number, transport in enumerate(transports):
            transport.write(b"%d" % number)
        transports[-1].write(b"!")

    wires, log = in_a_turn(count, work)
    assert [b"".join(wire.calls) for wire in wires] == [b"%d" % i for i in range(count - 1)] + [b"%d!" % (count - 1)]
    assert log.index("turn") == count // 32 * 32  # the first of very many do not wait for the last


def test_much_is_not_kept() -> None:
    def work(transports: list[GatheringTransport]) -> None:
        transports[0].write(b"a")
        transports[0].write(b"b" * (64 << 10))
        transports[0].write(b"c")
        assert transports[0].get_write_buffer_size() == 1

    (wire,), log = in_a_turn(1, work)
    assert wire.calls == [b"a" + b"b" * (64 << 10), b"c"]
    assert log == ["write", "turn", "write"]


def test_closing_sends_what_was_written_and_aborting_does_not() -> None:
    def work(transports: list[GatheringTransport]) -> None:
        closed, aborted, broken = transports
        for transport in transports:
            transport.write(b"last words")
        closed.close()
        aborted.abort()
        broken._transport.abort()
        assert all(transport.is_closing() for transport in transports)

    wires, _ = in_a_turn(3, work)
    assert [wire.calls for wire in wires] == [[b"last words"], [], []]
