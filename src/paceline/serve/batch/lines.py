"""A file of requests, one a line, as OpenAI's Batch API has it.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

`LineFile.scan` checks them all and remembers where each lies; after that a line is read when it is needed, so a file
may be larger than memory. Bodies are checked by the endpoint, when their turn comes: a bad one fails alone.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

from paceline.errors import BadRequest

MAX_ID_CHARS = 512
MOST_BAD_LINES = 100  # that are reported
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One request."""

    number: int  # in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]
    id: str  # of its answer: a digest of the line, so an answer shows whether it belongs to a line


@dataclass(frozen=True, slots=True)
class BadLine:
    """What is wrong with a line, or with the file as a whole (`number` None)."""

    number: int | None
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        return self.message if self.number is None else f"line {self.number}: {self.message}"


class _Wrong(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineFile:
    """The requests of one file, by their position (0 for the first); lines without text do not count.

    Reads are by position in the file, so threads may share one. Belongs to whoever closes it.
    """

    def __init__(self, path: Path, urls: Collection[str], *, salt: str = "") -> None:
        """`urls`: the endpoints a line may name. `salt` makes the ids of one batch differ from another's."""
        self.path = path
        self._urls = urls
        self._salt = salt.encode() + b"\0"
        self._fd = -1
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._numbers = array("Q")
        self._position_of: dict[str, int] = {}  # by custom_id
        self.models: dict[str, int] = {}  # each name that bodies give, and the number of the first line that does

    def __len__(self) -> int:
        return len(self._offsets)

    def position(self, custom_id: str) -> int | None:
        """Where the request of this name is."""
        return self._position_of.get(custom_id)

    def number(self, position: int) -> int:
        """The line's number in the file, from 1."""
        return self._numbers[position]

    def scan(self, *, max_line_bytes: int, max_lines: int | None = None) -> list[BadLine]:
        """Open and check the whole file; what is wrong, at most `MOST_BAD_LINES` of it. Raises OSError."""
        bad: list[BadLine] = []
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with open(self._fd, "rb", closefd=False) as file:
            for number, offset, raw in _read_lines(file, max_line_bytes):
                time.sleep(0)  # in a server this is a thread beside the event loop, which shall not wait for it
                text = raw.strip()
                if not text:
                    continue
                if max_lines is not None and len(self) == max_lines:
                    bad.append(BadLine(number, "too_many_requests", f"one batch holds at most {max_lines} requests"))
                    break
                try:
                    if len(raw) > max_line_bytes:
                        raise _Wrong("line_too_long", f"longer than {max_line_bytes} bytes")
                    self._add(number, offset, len(raw), text)
                except _Wrong as wrong:
                    bad.append(BadLine(number, wrong.code, str(wrong), wrong.param))
                    if len(bad) == MOST_BAD_LINES:
                        break
        if not bad and not len(self):
            bad.append(BadLine(None, "empty_file", "the file holds no requests"))
        return bad

    def check_models(self, names: Collection[str]) -> list[BadLine]:
        """Lines (the first of each kind) that name a model which is not served."""
        served = ", ".join(map(repr, names))
        return [
            BadLine(line, "model_not_found", f"the model {name[:128]!r} is not served here; {served} is", "body.model")
            for name, line in self.models.items()
            if name not in names
        ]

    def read(self, position: int) -> Line:
        """One request. Raises BadRequest if the file has changed since it was scanned."""
        raw = os.pread(self._fd, self._sizes[position], self._offsets[position]).strip()
        try:
            return self._parse(self._numbers[position], raw)
        except _Wrong as wrong:
            raise BadRequest(
                f"{self.path}, line {self._numbers[position]}: {wrong}; it was changed meanwhile"
            ) from None

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, number: int, offset: int, size: int, text: bytes) -> None:
        line = self._parse(number, text)
        first = self._position_of.setdefault(line.custom_id, len(self))
        if first != len(self):
            raise _Wrong(
                "duplicate_custom_id",
                f"custom_id {line.custom_id[:64]!r} is that of line {self._numbers[first]} too",
                "custom_id",
            )
        self._offsets.append(offset)
        self._sizes.append(size)
        self._numbers.append(number)
        model = line.body.get("model")
        if isinstance(model, str):
            self.models.setdefault(model, number)

    def _parse(self, number: int, text: bytes) -> Line:
        try:
            entry = pydantic_core.from_json(text.removeprefix(_BOM), allow_inf_nan=False)
        except ValueError as error:
            raise _Wrong("invalid_json_line", f"not valid JSON: {error}") from None
        if not isinstance(entry, dict):
            raise _Wrong("invalid_json_line", "not a JSON object")
        custom_id, method, url, body = (entry.get(name) for name in ("custom_id", "method", "url", "body"))
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
            raise _Wrong(
                "invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters", "custom_id"
            )
        if method != "POST":
            raise _Wrong("invalid_method", "method must be 'POST'", "method")
        if not isinstance(url, str) or url not in self._urls:
            raise _Wrong("invalid_url", f"url must be {' or '.join(map(repr, self._urls))}", "url")
        if not isinstance(body, dict):
            raise _Wrong("invalid_body", "body must be a JSON object", "body")
        digest = hashlib.sha256(self._salt + text).hexdigest()
        return Line(number, custom_id, url, body, f"batch_req_{digest[:24]}")


def _read_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of every line; of one over `most` bytes no more than `most` + 1 are kept."""
    number = offset = 0
    while raw := file.readline(most + 1):
        number += 1
        size = len(raw)
        kept = raw
        while len(raw) == most + 1 and not raw.endswith(b"\n"):
            raw = file.readline(most + 1)
            size += len(raw)
        yield number, offset, kept
        offset += size
