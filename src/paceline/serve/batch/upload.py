"""A multipart body in, under limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from paceline.errors import BadRequest, TooLarge
from paceline.serve.exchange import SlowBody, UnsupportedMediaType, limited_body

_FORM_BYTES = 64 << 10  # what boundaries and other fields may add to the file
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_NAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has arrived, somewhere temporary, with the other fields of its form."""

    filename: str
    content: BinaryIO
    size: int  # bytes
    fields: dict[str, str]


@asynccontextmanager
async def receive_upload(request: Request, *, max_bytes: int, timeout_s: float) -> AsyncIterator[Upload]:
    """The form's one file, gone again when the context ends.

    Raises UnsupportedMediaType, TooLarge, SlowBody, BadRequest; ClientDisconnect.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise UnsupportedMediaType(f"content-type should be multipart/form-data, not {kind[:64]!r}")
    parser = MultiPartParser(
        request.headers,
        limited_body(request, max_bytes + _FORM_BYTES, lambda _: _too_large(max_bytes)),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_MAX_FIELD_BYTES,
    )
    try:
        async with asyncio.timeout(timeout_s):
            form = await parser.parse()
    except TimeoutError:
        raise SlowBody(f"the file did not arrive within {timeout_s:g} s") from None
    except MultiPartException as error:
        raise BadRequest(f"the form cannot be read: {error.message}", code="invalid_form") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("the form needs a part named file, with a filename", param="file")
        if (size := file.size or 0) > max_bytes:
            raise _too_large(max_bytes)
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        yield Upload(_plain_name(file.filename or ""), file.file, size, fields)
    finally:
        await form.close()


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the file is over {max_bytes} bytes, the most it may have here", code="file_too_large")


def _plain_name(name: str) -> str:
    """A client's name for its file: shown again, never used as a path."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[:_MAX_NAME_CHARS] or "input.jsonl"
