"""Content digests of checkpoint files, so that new weights under an old name never pass for the old ones.

A digest covers every byte: sampling or headers would miss an edited tensor. Reading a large checkpoint for it costs
about as long as reading it to load it, so digests are kept in a cache folder under everything the file system knows of
the file: path, size, inode, and the times of the last change of its content and of its inode (which tools cannot set
back).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CorruptModel


def files_digest(paths: Sequence[Path], cache_dir: Path | None = None) -> str:
    """Hex sha256 over the names and contents of the files, in the order given. None caches nothing."""
    return _total([(path, file_digest(path, cache_dir)) for path in paths])


def kept_digest(path: Path, cache_dir: Path) -> str | None:
    """What `files_digest([path], cache_dir)` returns, if that need not read the file."""
    try:
        known = _kept(cache_dir / _identity(path))
    except OSError:
        return None
    return None if known is None else _total([(path, known)])


def file_digest(path: Path, cache_dir: Path | None = None) -> str:
    """Hex sha256 of one file's content."""
    try:
        entry = None if cache_dir is None else cache_dir / _identity(path)
        if entry is not None and (known := _kept(entry)) is not None:
            return known
        with path.open("rb") as file:
            before = _identity(path)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorruptModel(f"{path}: cannot be read ({error})") from error
    # A file that changed while it was read has no digest worth keeping.
    if entry is not None and before == entry.name == _identity(path):
        _keep(entry, digest)
    return digest


def _total(digests: Sequence[tuple[Path, str]]) -> str:
    """The digest of several files, from each one's."""
    total = hashlib.sha256()
    for path, digest in digests:
        total.update(f"{path.name}\0{digest}\n".encode())
    return total.hexdigest()


def _kept(entry: Path) -> str | None:
    """What an entry of the cache says, if it is there and whole."""
    known = entry.read_text(encoding="ascii") if entry.is_file() else ""
    return known if len(known) == 64 else None


def _identity(path: Path) -> str:
    """A name that changes whenever the file may have."""
    stat = path.stat()
    facts = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _keep(entry: Path, digest: str) -> None:
    """Write the entry in one step. A cache that cannot be written is no reason to fail."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        part = entry.with_name(f"{entry.name}.{os.getpid()}.part")
        part.write_text(digest, encoding="ascii")
        part.replace(entry)
    except OSError:
        return
