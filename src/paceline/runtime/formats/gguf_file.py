"""The container format of GGUF: metadata, a directory of tensors, then their data.

The `gguf` package has a reader too, but it makes an array for every string in the vocabulary (seconds of start-up,
where this takes tens of milliseconds) and trusts the lengths that the file gives. Dequantization is the package's.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Tensor types that are tested here. The package knows more; one line and a test add them.
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
# Elements dequantized at a time: large enough for numpy, small enough to stay in cache.
_CHUNK = 1 << 18

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the directory. `shape` is in numpy's order, rows first; `offset` is from the start of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings in the metadata, decoded one by one when asked for: vocabularies are long, looks are few."""

    def __init__(self, data: memoryview, offsets: list[int]) -> None:
        self._data = data
        self._offsets = offsets  # of each string's length field

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = self._offsets[index]
        (length,) = struct.unpack_from("<Q", self._data, at)
        return bytes(self._data[at + 8 : at + 8 + length]).decode("utf-8", errors="replace")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Raises CorruptModel and UnsupportedModel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            with path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError as error:  # what mmap says of an empty file
            raise CorruptModel(f"{path}: the file is empty") from error
        self._at = 0
        try:
            self._read_directory()
        except struct.error as error:
            raise CorruptModel(f"{path}: truncated in its header, at byte {self._at}; download it again") from error

    def read(
        self, name: str, dtype: torch.dtype, rows: NDArray[np.int64] | None = None, index: int | None = None
    ) -> Tensor:
        """The tensor `name` in `dtype`, in memory of its own. KeyError if there is none of that name.

        With `rows`, entries of axis 0 come in that order; with `index`, only that entry of axis 0 does.
        """
        entry = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[entry.kind]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)
        shape = entry.shape
        if rows is not None:
            raw = raw.reshape(shape[0], -1)[rows].reshape(-1)
        if index is not None:
            raw, shape = raw.reshape(shape[0], -1)[index], shape[1:]
        out = torch.empty(shape, dtype=dtype)
        flat = out.view(-1)
        step = _CHUNK // block * block
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            piece = raw[start // block * block_bytes : stop // block * block_bytes]
            flat[start:stop] = torch.from_numpy(_decode(piece, entry.kind))
        return out

    def header_digest(self) -> str:
        """Hex sha256 of everything before the tensors' data: metadata, tokenizer and directory."""
        return hashlib.sha256(self._data[: self._at]).hexdigest()

    def require_supported(self) -> None:
        """Raise UnsupportedModel if a tensor has a type we do not read."""
        for entry in self.tensors.values():
            if entry.kind not in SUPPORTED_TYPES:
                known = ", ".join(kind.name for kind in SUPPORTED_TYPES)
                raise UnsupportedModel(
                    f"{self.path}: tensor {entry.name} has type {entry.kind.name}, which is not read (known: {known})"
                )

    # The directory, read front to back; self._at is the cursor.

    def _read_directory(self) -> None:
        if bytes(self._data[:4]) != MAGIC:
            raise CorruptModel(f"{self.path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise UnsupportedModel(f"{self.path}: a big-endian GGUF file; convert the model for this machine")
            raise UnsupportedModel(f"{self.path}: GGUF version {version} (known: {VERSIONS})")
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(f"{self.path}: one part of a split file; merge them with llama-gguf-split --merge")
        found = [self._tensor_info() for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment <= 0 or alignment & (alignment - 1):
            raise CorruptModel(f"{self.path}: general.alignment is {alignment}, not a power of two")
        data_start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in found:
            self._add_tensor(name, kind, shape, data_start + offset)

    def _add_tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> None:
        if name in self.tensors:
            raise CorruptModel(f"{self.path}: tensor {name} is there twice")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[known]
        if not shape or shape[-1] % block:
            raise CorruptModel(f"{self.path}: tensor {name} has shape {list(shape)}, not whole blocks of {block}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset + nbytes > len(self._data):
            raise CorruptModel(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + nbytes}, "
                f"the file has {len(self._data)}; download it again"
            )
        self.tensors[name] = TensorEntry(name, known, shape, offset, nbytes)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _skip_string(self) -> int:
        """Move over a string; its start."""
        start = self._at
        self._advance(self._scalar("<Q"))
        return start

    def _skip_strings(self, count: int) -> list[int]:
        """Move over so many strings; their starts. One plain loop: vocabulary and merges are 100,000 and more."""
        length_at, end, at = struct.Struct("<Q").unpack_from, len(self._data), self._at
        starts = []
        for _ in range(count):
            starts.append(at)
            at += 8 + length_at(self._data, at)[0]
            if at > end:
                raise struct.error
        self._at = at
        return starts

    def _advance(self, count: int) -> None:
        if self._at + count > len(self._data):
            raise struct.error
        self._at += count

    def _string(self) -> str:
        start = self._skip_string()
        try:
            return bytes(self._data[start + 8 : self._at]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptModel(f"{self.path}: a string at byte {start} is not UTF-8") from error

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 4:
            raise CorruptModel(f"{self.path}: unknown metadata type {kind} at byte {self._at}")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item == _STRING:
            return StringArray(self._data, self._skip_strings(count))
        if item in _SCALARS:
            start = self._at
            form = np.dtype(_SCALARS[item])
            self._advance(count * form.itemsize)
            return np.frombuffer(self._data, dtype=form, count=count, offset=start).tolist()
        return [self._value(item, depth + 1) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dims = self._scalar("<I")
        if dims > 8:
            raise CorruptModel(f"{self.path}: tensor {name} has {dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]  # the file gives the fastest axis first
        return name, self._scalar("<I"), shape, self._scalar("<Q")


def _decode(piece: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Whole blocks of bytes -> float32 (or float16) values."""
    if kind == GGMLQuantizationType.F32:
        return piece.view(np.float32).copy()
    if kind == GGMLQuantizationType.F16:
        return piece.view(np.float16).copy()
    # As one row: the package goes over long tensors in groups of 16 rows, which is slow when rows are short.
    values: NDArray[Any] = dequantize(piece.reshape(1, -1), kind).reshape(-1)
    return values
