"""Files of weights as the native kernels lay them out, so that a second start maps what the first one packed.

A file is a cache and nothing else: it is made from a checkpoint, under a name that changes with everything its content
depends on (`packed_path`), and whatever is wrong with it means that weights are packed again. So `PackedFile.open` says
None where others would raise, and `PackedWriter` gives up with a line in the log.

    prefix   64 bytes: magic, version, where the header lies and how long it is, sha256 of these and of the header
    data     each array at a multiple of 64 bytes
    header   JSON, to the end of the file: {"weights": {name: [description, offset, bytes]},
             "tensors": {name: [dtype, shape, offset, bytes]}}

A file that was cut short anywhere has no header where its prefix says, or no whole one. Data are not checked: that
would read gigabytes that are mapped in order not to be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VERSION = 1
ALIGNMENT = 64  # bytes; what the kernels ask of packed weights
# What a folder of packed files may hold; those that were not used for longest go first, the newest stays.
MOST_FILES = 8
MOST_BYTES = 32 << 30

_MAGIC = b"PLPACKED"
_PREFIX = struct.Struct("<8sQQQ32s")  # magic, version, offset and bytes of the header, digest
_SUFFIX, _PART = ".pack", ".part"
_STALE_S = 3600.0  # a part that nobody wrote to for this long was left by a process that died

log = logging.getLogger("paceline.runtime")


def packed_path(cache_dir: Path, content: str, kinds: str, native: ModuleType) -> Path:
    """Where weights of a checkpoint are kept: `cache_dir/packed/KEY.pack`.

    content  the checkpoint's digest (`formats.digest.files_digest`)
    kinds    all that was chosen about how weights are stored, in any fixed spelling
    native   `paceline_native`: its version, its compiled code and the instruction set in use are part of the key, as
             each of them may lay weights out in another way
    """
    code = Path(native._core.__file__).read_bytes()
    facts = (VERSION, content, kinds, native.isa(), native.__version__, hashlib.sha256(code).hexdigest())
    return cache_dir / "packed" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}{_SUFFIX}"


class PackedFile:
    """An open file.

    weights  by name: the description and the bytes that `paceline_native.restore` takes, uint8 [n] at a multiple of
             64 bytes, read-only
    tensors  by name: everything else. Private to this process: what is written to one never reaches the file

    All of them are views of one memory map, which lives as long as any of them, whatever becomes of the file's name.
    """

    def __init__(
        self, weights: dict[str, tuple[dict[str, Any], NDArray[np.uint8]]], tensors: dict[str, Tensor]
    ) -> None:
        self.weights = weights
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> PackedFile | None:
        """None where there is no such file, or it is of another version, cut short or damaged in its header."""
        try:
            with path.open("rb") as file:
                # Copy on write, as torch wants memory that it may write to.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            found = cls(*_contents(data))
        except FileNotFoundError:
            return None
        # ValueError: an empty file to mmap, an array beyond the end to numpy, no JSON.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            log.warning("%s: not used, and to be packed again (%s)", path, error)
            return None
        with contextlib.suppress(OSError):  # where nothing may be written, nothing is removed either
            os.utime(path)  # `_trim` goes by this; the time of the last access is often not kept
        return found


def _contents(data: mmap.mmap) -> tuple[dict[str, tuple[dict[str, Any], NDArray[np.uint8]]], dict[str, Tensor]]:
    magic, version, at, size, digest = _PREFIX.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise ValueError("of another version")
    if at + size != len(data):
        raise ValueError(f"has {len(data)} bytes, not {at + size}")
    if _digest(at, data[at:]) != digest:
        raise ValueError("its header is damaged")
    header = json.loads(data[at:])

    def view(offset: int, nbytes: int) -> NDArray[np.uint8]:
        if offset % ALIGNMENT:
            raise ValueError(f"an array at byte {offset}")
        return np.frombuffer(data, dtype=np.uint8, count=nbytes, offset=offset)

    weights = {}
    for name, (description, offset, nbytes) in header["weights"].items():
        array = view(offset, nbytes)
        array.flags.writeable = False
        weights[name] = (description, array)
    tensors = {
        name: torch.from_numpy(view(offset, nbytes)).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, offset, nbytes) in header["tensors"].items()
    }
    return weights, tensors


def _digest(at: int, header: bytes) -> bytes:
    return hashlib.sha256(_PREFIX.pack(_MAGIC, VERSION, at, len(header), b"") + header).digest()


class PackedWriter:
    """A file in the making, beside its place until `commit`. Any number of processes may make the same one.

    Arrays go to the disk as they come. When that fails (a full disk, a folder that may not be written to, more than
    `most_bytes`), one line in the log says so, what was written is removed, and the rest is ignored. Use it in a `with`
    block: one that ends without `commit`, by an error or not, leaves nothing behind.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._weights: dict[str, tuple[Mapping[str, Any], int, int]] = {}
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._file: BinaryIO | None = None  # None: given up, or done
        self._part = Path()
        with self._giving_up():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem[:16]}.", suffix=_PART)
            self._part = Path(part)
            self._file = os.fdopen(handle, "wb")
            self._file.write(bytes(_PREFIX.size))

    def add(self, name: str, description: Mapping[str, Any], array: NDArray[np.uint8]) -> None:
        """Packed weights: uint8 [n], and a description that JSON can hold."""
        if name in self._weights:
            raise ValueError(f"packed weights {name!r} are there already")
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"packed weights {name!r} are {array.dtype} with {array.ndim} axes, not uint8 with one")
        self._weights[name] = (description, self._append(array), array.nbytes)

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """A tensor of any shape and dtype, as it is."""
        if name in self._tensors:
            raise ValueError(f"tensor {name!r} is there already")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._tensors[name] = (dtype, tuple(tensor.shape), self._append(flat), flat.nbytes)

    def commit(self) -> bool:
        """Put the file in its place, and remove what the folder has too much of. False where writing failed."""
        header = json.dumps({"weights": self._weights, "tensors": self._tensors}).encode()
        at = self._append(np.frombuffer(header, dtype=np.uint8))
        with self._giving_up():
            if self._file is None:
                return False
            self._file.seek(0)
            self._file.write(_PREFIX.pack(_MAGIC, VERSION, at, len(header), _digest(at, header)))
            self._file.close()
            os.replace(self._part, self.path)
            self._file = None
            trim(self.path.parent)
            return True
        return False

    def discard(self) -> None:
        """Remove what was written. After `commit` this does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # the buffer's rest may fit the disk as little as what came before
                file.close()
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.discard()

    def _append(self, array: NDArray[np.uint8]) -> int:
        """Write the bytes at the next multiple of 64. Returns the offset."""
        with self._giving_up():
            if self._file is None:
                return 0
            at = self._file.tell()
            at += -at % ALIGNMENT
            if at + array.nbytes > self._most_bytes:
                raise OSError(f"it would have more than {self._most_bytes / 2**30:g} GiB")
            self._file.seek(at)
            self._file.write(np.ascontiguousarray(array).data)
            return at
        return 0

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("%s: packed weights are not kept, so each start packs them (%s)", self.path, error)
            self.discard()


def trim(folder: Path, *, most_files: int = MOST_FILES, most_bytes: int = MOST_BYTES) -> None:
    """Remove files that were not used for longest until the rest fit; the last used stays. Errors are ignored.

    A file that someone has mapped stays readable to them.
    """
    with contextlib.suppress(OSError):
        for part in folder.glob(f"*{_PART}"):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink(missing_ok=True)
        used = [(path.stat(), path) for path in folder.glob(f"*{_SUFFIX}")]
        used.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        total = 0
        for rank, (stat, path) in enumerate(used):
            total += stat.st_size
            if rank > 0 and (rank >= most_files or total > most_bytes):
                path.unlink(missing_ok=True)
