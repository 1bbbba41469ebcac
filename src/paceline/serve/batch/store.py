"""Files and batches on disk, each owned by its tenant.

    FOLDER/lock                       held by the one server that uses the folder
    FOLDER/files/file-ID.json         what is known of a file; written last, so without it there is no file
    FOLDER/files/file-ID.data         what it holds
    FOLDER/batches/batch_ID/batch.json
    FOLDER/batches/batch_ID/input.jsonl, output.jsonl, errors.jsonl, strikes    while it has not ended
    FOLDER/incoming/                  what is being written; emptied at start

Everything that must change as one is written beside its place, synced and renamed. No name on disk ever comes from a
client: ids are ours, and one that a client sends is only looked up. Folders are for this user's eyes alone.

Methods that change something block on the disk; call them in a thread. They may be called from several.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from paceline.errors import ConfigError, NotFound
from paceline.serve.batch.ledger import sync_folder

log = logging.getLogger("paceline.serve")


class Status(StrEnum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING, Status.EXPIRED}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.FAILED, Status.CANCELLING, Status.EXPIRED}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.FAILED}),
    Status.CANCELLING: frozenset({Status.CANCELLED, Status.FAILED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant. Times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str  # "batch" or "batch_output"
    size: int  # bytes
    created_at: int
    expires_at: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed: one thing that is wrong with its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant. Times are Unix seconds; `times` has when each status after the first was reached."""

    id: str
    tenant: str
    caller: str  # name of the key that made it
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    times: dict[Status, int] = {}
    metadata: dict[str, str] | None = None
    output_keep_s: int | None = None  # how long its outputs stay; None: as long as any file
    model: str | None = None
    fingerprint: str | None = None  # of the model that works it off
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[Fault, ...] = ()


_Record = TypeVar("_Record", FileRecord, BatchRecord)


class Store:
    """All files and batches of one folder, which it holds until `close`. A folder appears with its first file."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where another server uses the folder, or it cannot be used."""
        self._folder = folder
        self._lock = threading.RLock()
        self._held = -1
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        if folder.exists():
            self._take()

    def close(self) -> None:
        """Let another server have the folder. Idempotent."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # What there is ---------------------------------------------------------------------------------------------------

    def file(self, file_id: str, tenant: str) -> FileRecord:
        """Raises NotFound, for another tenant's file as for one that never was."""
        found = self.files.get(file_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"no such file: {file_id[:64]!r}", param="file_id", code="file_not_found")
        return found

    def batch(self, batch_id: str, tenant: str) -> BatchRecord:
        """Raises NotFound, for another tenant's batch as for one that never was."""
        found = self.batches.get(batch_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"no such batch: {batch_id[:64]!r}", param="batch_id", code="batch_not_found")
        return found

    def files_of(self, tenant: str) -> list[FileRecord]:
        """Newest first."""
        return _of(self.files.values(), tenant)

    def batches_of(self, tenant: str) -> list[BatchRecord]:
        """Newest first."""
        return _of(self.batches.values(), tenant)

    def content(self, record: FileRecord) -> Path:
        """Where a file's bytes are."""
        return self._folder / "files" / f"{record.id}.data"

    def folder_of(self, batch: BatchRecord) -> Path:
        """Where a batch that has not ended keeps its input and its answers."""
        return self._folder / "batches" / batch.id

    # Changes ---------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord, source: BinaryIO) -> None:
        """Take in what a client sent. Raises ConfigError as `__init__` does, if it is the first."""
        with self._lock:
            if self._held < 0:
                self._take()
        incoming = self._folder / "incoming" / record.id
        try:
            with open(incoming, "xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            os.replace(incoming, self.content(record))
        finally:
            incoming.unlink(missing_ok=True)
        self._keep_file(record)

    def publish(self, record: FileRecord, source: Path) -> None:
        """Make a file of a batch's finished output; done a second time, nothing happens."""
        if record.id not in self.files:
            if not self.content(record).exists():
                self._link(source, self.content(record))
            self._keep_file(record)

    def remove_file(self, record: FileRecord) -> None:
        """The record first: what has none is no file."""
        with self._lock:
            if self.files.pop(record.id, None) is None:
                return
        self._path(record).unlink(missing_ok=True)
        self.content(record).unlink(missing_ok=True)

    def add_batch(self, record: BatchRecord, source: FileRecord) -> None:
        """A new batch, with an input that stays its own whatever becomes of the file."""
        folder = self.folder_of(record)
        folder.mkdir(mode=0o700)
        try:
            self._link(self.content(source), folder / "input.jsonl")
            self._write(record)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_folder(folder.parent)
        self.batches[record.id] = record

    def save_batch(self, batch_id: str) -> None:
        """Write a batch as `batches` has it by now: of several writers the last cannot write what is old."""
        with self._lock:
            if (record := self.batches.get(batch_id)) is not None:
                self._write(record)

    def remove_batch(self, record: BatchRecord) -> None:
        """All of it."""
        with self._lock:
            self.batches.pop(record.id, None)
        self._path(record).unlink(missing_ok=True)
        shutil.rmtree(self.folder_of(record), ignore_errors=True)

    def clear_work(self, record: BatchRecord) -> None:
        """Of a batch that has ended, nothing but its record is kept. Idempotent."""
        for name in ("input.jsonl", "output.jsonl", "errors.jsonl", "strikes"):
            (self.folder_of(record) / name).unlink(missing_ok=True)

    # On disk ---------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        folder = self._folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._held = _hold(folder / "lock")
            shutil.rmtree(folder / "incoming", ignore_errors=True)
            for name in ("files", "batches", "incoming"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
            self._load()
        except OSError as error:
            self.close()
            raise ConfigError(f"the folder for batches, {folder}, cannot be used: {error.strerror or error}") from error

    def _keep_file(self, record: FileRecord) -> None:
        with self._lock:
            self._write(record)
            self.files[record.id] = record

    def _link(self, source: Path, target: Path) -> None:
        """A second name for the same bytes, or a copy where the file system has no such thing."""
        try:
            os.link(source, target)
        except OSError:
            incoming = self._folder / "incoming" / f"{target.parent.name}-{target.name}"
            shutil.copyfile(source, incoming)
            os.replace(incoming, target)

    def _path(self, record: FileRecord | BatchRecord) -> Path:
        if isinstance(record, FileRecord):
            return self._folder / "files" / f"{record.id}.json"
        return self.folder_of(record) / "batch.json"

    def _write(self, record: FileRecord | BatchRecord) -> None:
        target = self._path(record)
        incoming = self._folder / "incoming" / f"{record.id}.json"
        with open(incoming, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(incoming, target)
        sync_folder(target.parent)

    def _load(self) -> None:
        for path in sorted((self._folder / "files").glob("*.json")):
            file = _read(path, FileRecord)
            if file is not None and self.content(file).exists():
                self.files[file.id] = file
        for path in sorted((self._folder / "batches").glob("*/batch.json")):
            batch = _read(path, BatchRecord)
            if batch is not None:
                self.batches[batch.id] = batch
                if batch.status.is_end:
                    self.clear_work(batch)
        self._sweep_orphans()

    def _sweep_orphans(self) -> None:
        """Bytes whose record was never written, or is gone. What a batch is about to publish it can link again."""
        for path in (self._folder / "files").glob("*.data"):
            if not path.with_suffix(".json").exists():
                path.unlink()
        for path in (self._folder / "batches").iterdir():
            if not (path / "batch.json").exists():
                shutil.rmtree(path, ignore_errors=True)


def new_id(prefix: str) -> str:
    """An id that is new in the whole world and sorts by time: `prefix` and 24 hexadecimal digits."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"


def _hold(path: Path) -> int:
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(
            f"another server uses the folder for batches, {path.parent}; give this one its own with --batch-dir"
        ) from None
    return held


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        log.error("%s cannot be read and is left as it is: %s", path, error)
        return None


def _of(records: Iterable[_Record], tenant: str) -> list[_Record]:
    own = [record for record in records if record.tenant == tenant]
    return sorted(own, key=lambda record: record.id, reverse=True)
