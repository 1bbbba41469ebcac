"""What a turn of the event loop writes, to however many connections, goes out together at its end.

A step of the engine is news for every stream at once. Written one by one between the work for the next, each piece
would wake its reader separately, and on the same machine that costs both sides more than the piece itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_MOST_CONNECTIONS = 32  # the first of them waits for the work of so many
_MOST_BYTES = 64 << 10  # of one connection: what is larger is worth a call to the kernel of its own


class Outbox:
    """The connections of one event loop that have something to send."""

    def __init__(self) -> None:
        self._waiting: list[GatheringTransport] = []

    def add(self, transport: GatheringTransport, loop: asyncio.AbstractEventLoop) -> None:
        """Flush it when what is ready now has run; sooner, if it is one of many."""
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(transport)
        if len(self._waiting) >= _MOST_CONNECTIONS:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class GatheringTransport(asyncio.Transport):
    """A transport whose writes wait in an outbox; all else is the real one's."""

    def __init__(self, transport: asyncio.Transport, outbox: Outbox, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._outbox = outbox
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._parts.append(bytes(data))
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self.flush()
        elif len(self._parts) == 1:
            self._outbox.add(self, self._loop)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def flush(self) -> None:
        """Hand over what was written."""
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
