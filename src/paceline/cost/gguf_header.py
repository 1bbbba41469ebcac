"""The header of a GGUF file: its metadata and its directory of tensors. The tensors' data are never read.

The format is llama.cpp's (ggml/docs/gguf.md). `runtime/formats` reads whole files with torch; a plan needs the sizes
alone, also of a file of which only the beginning has been fetched.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 27  # bytes of a string or entries of an array; more is damage
_KEPT = 4096  # entries of an array that are kept: numbers by layer are few, vocabularies are not wanted


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says before its data."""

    path: Path
    metadata: dict[str, Any]  # arrays of strings and long ones are None
    shapes: dict[str, tuple[int, ...]]  # of each tensor, rows first
    kinds: dict[str, int]  # ggml type of each tensor

    def rows(self, name: str) -> int:
        """First dimension of a tensor; 0 if there is none of that name."""
        return self.shapes[name][0] if name in self.shapes else 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors. UnsupportedModel for a type that the gguf package does not know."""
        # Imported here: the package is slow to import, and few plans read a file.
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        total = 0
        for name, shape in self.shapes.items():
            if self.kinds[name] not in sizes:
                raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type {self.kinds[name]}")
            block, nbytes = sizes[self.kinds[name]]
            total += math.prod(shape) // block * nbytes
        return total

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes, over all tensors."""
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        if not weights:
            raise CorruptModel(f"{self.path}: there are no tensors in it")
        return round(8.0 * self.tensor_bytes / weights, 4)


def read_header(path: Path) -> Header:
    """The header of the file. Raises ModelNotFound, CorruptModel and UnsupportedModel."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ModelNotFound(f"{path}: {error.strerror or error}") from error


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file

    def header(self) -> Header:
        if self._bytes(4) != b"GGUF":
            raise CorruptModel(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path}: GGUF version {version & 0xFFFFFFFF} (known: 2, 3, little-endian)")
        tensors, entries = self._count(), self._count()
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        if (metadata.get("split.count") or 1) > 1:
            raise UnsupportedModel(f"{self.path}: one part of a split file; merge them with llama-gguf-split --merge")
        shapes, kinds = {}, {}
        for _ in range(tensors):
            name, dims = self._string(), self._scalar("<I")
            if dims > 8:
                raise CorruptModel(f"{self.path}: tensor {name} has {dims} dimensions")
            # The file gives the fastest axis first.
            shapes[name] = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
            kinds[name] = self._scalar("<I")
            self._scalar("<Q")  # where its data begin
        return Header(self.path, metadata, shapes, kinds)

    def _bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise CorruptModel(f"{self.path}: truncated in its header, at byte {self.file.tell()}")
        return data

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self) -> int:
        count: int = self._scalar("<Q")
        if count > _LONGEST:
            raise CorruptModel(f"{self.path}: {count} entries at byte {self.file.tell()}, more than any model has")
        return count

    def _string(self) -> str:
        return self._bytes(self._count()).decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 4:
            raise CorruptModel(f"{self.path}: unknown metadata type {kind} at byte {self.file.tell()}")
        item, count = self._scalar("<I"), self._count()
        if item in _SCALARS:
            form = _SCALARS[item]
            data = self._bytes(count * struct.calcsize(form))
            return [value for (value,) in struct.iter_unpack(form, data)] if count <= _KEPT else None
        for _ in range(count):
            if item == _STRING:
                self._bytes(self._count())
            else:
                self._value(item, depth + 1)
        return None
