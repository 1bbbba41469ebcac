"""The answers of a batch on disk: two append-only files of one JSON object a line, for what succeeded and what failed.

What is on disk is done. A record is written with one call as soon as its request has ended, so a killed process loses
none that it had; what was being written when it died is a line without an end, which the next run cuts off and does
again. `sync` (called about once a second, and by `close`) makes records survive the machine's own end: a power cut
costs at most the requests of the last second, and they too are done again, not doubled.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import BadRequest, ConfigError
from paceline.serve.batch.lines import Line, LineFile
from paceline.serve.exchange import encode_json

_START = b'{"id":"batch_req_'


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    system_fingerprint: str | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Record(msgspec.Struct):
    """What is read back of a line; the rest of it is skipped."""

    id: str
    custom_id: str
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Record)


class Ledger:
    """Which requests of `lines` are answered, and their answers. Open it before use; close it after. One writer."""

    def __init__(self, lines: LineFile, output: Path, errors: Path) -> None:
        self._lines = lines
        self._files = {True: _AppendFile(output), False: _AppendFile(errors)}
        self._done = bytearray()
        self.completed = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.fingerprints: set[str] = set()  # of the models that made the answers

    def open(self) -> None:
        """Take up what an earlier run wrote.

        Raises BadRequest where a file holds something else than answers to these lines, and leaves it as it is;
        ConfigError where another process writes it; OSError.
        """
        self._done = bytearray(len(self._lines))
        sizes = {}
        for succeeded, file in self._files.items():
            file.open(create=succeeded)
            sizes[succeeded] = self._read_back(file.path, succeeded) if file.is_open else 0
        for succeeded, file in self._files.items():  # only now that all is known to be ours
            if file.is_open:
                file.cut(sizes[succeeded])

    @property
    def total(self) -> int:
        """Requests of the batch."""
        return len(self._done)

    def undone(self) -> Iterator[int]:
        """Positions without an answer at the time they are asked for, in order."""
        return (position for position in range(self.total) if not self._done[position])

    def answer(self, position: int, line: Line, status: int, request_id: str, body: dict[str, Any]) -> None:
        """Write down how a request ended. Raises OSError, and then nothing is written."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._append(position, line, response, None, succeeded=status == 200)
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]

    def give_up(self, position: int, line: Line, code: str, message: str) -> None:
        """Write down that a request was never answered. Raises OSError, and then nothing is written."""
        self._append(position, line, None, {"code": code, "message": message}, succeeded=False)

    def sync(self) -> None:
        """Make what is written survive a power cut. Blocks: not for the event loop."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Sync and let go. Idempotent. Blocks."""
        for file in self._files.values():
            file.close()

    def _append(
        self, position: int, line: Line, response: dict[str, Any] | None, error: Any, *, succeeded: bool
    ) -> None:
        assert not self._done[position], f"line {line.number} would be answered twice"
        record = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
        self._files[succeeded].append(encode_json(record) + b"\n")
        self._note(position, succeeded)

    def _note(self, position: int, succeeded: bool) -> None:
        self._done[position] = 1
        self.completed += succeeded
        self.failed += not succeeded

    def _read_back(self, path: Path, succeeded: bool) -> int:
        """Note the records of a file; how many of its bytes are whole records."""
        end = 0
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if raw.startswith(_START) or _START.startswith(raw) or not raw.strip(b"\0"):
                        break  # it was being written when the process, or the machine, died
                    raise BadRequest(f"{path} is no output of a batch; name another, or remove it")
                self._read_record(f"{path}, line {number}", raw, succeeded)
                end += len(raw)
        return end

    def _read_record(self, where: str, raw: bytes, succeeded: bool) -> None:
        try:
            record = _decoder.decode(raw)
        except msgspec.DecodeError:
            raise BadRequest(f"{where}: not an answer of a batch; name another file, or remove this one") from None
        position = self._lines.position(record.custom_id)
        named = f"custom_id {record.custom_id[:64]!r}"
        if position is None:
            raise BadRequest(
                f"{where}: answers {named}, which {self._lines.path} does not have: another batch's output"
            )
        if self._lines.read(position).id != record.id:
            raise BadRequest(
                f"{where}: answers {named} as it was before line {self._lines.number(position)} of {self._lines.path} "
                "changed; name another file, or remove this one"
            )
        if self._done[position]:
            raise BadRequest(f"{where}: answers {named} a second time")
        self._note(position, succeeded)
        body = record.response.body if record.response is not None else _Body()
        if body.usage is not None:
            self.prompt_tokens += body.usage.prompt_tokens
            self.completion_tokens += body.usage.completion_tokens
        if body.system_fingerprint is not None:
            self.fingerprints.add(body.system_fingerprint)


class _AppendFile:
    """A file that only grows, one whole record at a time, and that no other process writes meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._size = 0
        self._dirty = False

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def open(self, *, create: bool) -> None:
        """Open if it is there, or `create` it."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags | (os.O_CREAT if create else 0), 0o666)
        except FileNotFoundError:
            if create:
                raise
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            self._fd = -1
            raise ConfigError(f"another process is writing {self.path}") from None
        self._size = os.fstat(self._fd).st_size
        if create:
            sync_folder(self.path.parent)

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes alone."""
        if size != self._size:
            os.ftruncate(self._fd, size)
            self._size = size
            self._dirty = True

    def append(self, record: bytes) -> None:
        """All of it or nothing."""
        if not self.is_open:
            self.open(create=True)
        rest = memoryview(record)
        self._dirty = True
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # no half record stays before a later whole one
            raise
        self._size += len(record)

    def sync(self) -> None:
        if self._dirty:
            self._dirty = False  # first: what is appended meanwhile is for the next sync
            os.fsync(self._fd)

    def close(self) -> None:
        if self.is_open:
            try:
                self.sync()
            finally:
                os.close(self._fd)
                self._fd = -1


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
