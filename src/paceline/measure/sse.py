"""Server-sent events from bytes, cut anywhere: inside a field name, a line end or a character.

The rules are the WHATWG ones, with two that a measurement needs: an event knows in which network read the last byte of
its data came, and an event that the end of the stream left without its blank line still counts.
"""

from __future__ import annotations

from typing import NamedTuple

BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event."""

    data: bytes  # its data lines joined by \n; UTF-8 by the standard, not checked here
    name: str  # of the `event:` field, "" where there is none
    read: int  # ordinal of the network read that held the last byte of `data`


class SSEParser:
    """Feed reads in order; events come out as soon as their blank line is there."""

    __slots__ = ("_data", "_fresh", "_name", "_read", "_skip_lf", "_tail", "_tail_read", "comments")

    def __init__(self) -> None:
        self.comments = 0
        self._tail = b""  # an unfinished line
        self._tail_read = 0  # the read that brought its last byte
        self._skip_lf = False  # the last byte was a CR that already ended its line
        self._fresh = True  # nothing seen yet: a byte order mark may come
        self._data: list[bytes] = []
        self._name = ""
        self._read = 0

    def feed(self, data: bytes, read: int) -> list[Event]:
        """Events completed by these bytes. `read` is the ordinal of the network read that brought them."""
        if self._skip_lf and data:
            self._skip_lf = False
            if data[0] == 0x0A:
                data = data[1:]
        if not data:
            return []
        if b"\r" in data:
            self._skip_lf = data[-1] == 0x0D
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        head, last = lines[0], len(lines) - 1
        if last == 0:  # no line ended here
            self._tail += head
            self._tail_read = read
            return []
        # The first line may have begun earlier; if all it got now is its line end, its bytes came with that read.
        first_read = read if head else self._tail_read
        lines[0] = self._tail + head
        self._tail = lines[last]
        self._tail_read = read
        if self._fresh:
            self._fresh = False
            lines[0] = lines[0].removeprefix(BOM)
        events: list[Event] = []
        for i in range(last):
            line = lines[i]
            if line:
                self._field(line, first_read if i == 0 else read)
            elif self._data or self._name:
                self._dispatch(events)
        return events

    def close(self) -> list[Event]:
        """The stream ended: what waits for its line end or blank line is taken as complete."""
        events: list[Event] = []
        if self._tail:
            self._field(self._tail, self._tail_read)
            self._tail = b""
        self._dispatch(events)
        return events

    def _field(self, line: bytes, read: int) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            self._read = read
        elif line[0] == 0x3A:
            self.comments += 1
        else:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(b"")
                self._read = read
            elif name == b"event":
                self._name = value.removeprefix(b" ").decode("utf-8", "replace")
            # id, retry and unknown fields change nothing for us

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append(Event(data, self._name, self._read))
            self._data = []
        self._name = ""
