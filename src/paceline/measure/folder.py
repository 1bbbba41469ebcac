"""One run, one folder: append-only JSON lines that a crash leaves readable.

    manifest.json           what was run, rewritten atomically (Manifest)
    schedule.jsonl          the resolved arrival list, so that a resumed or repeated run needs no trace file
    warmup.jsonl            requests before the run (RequestRecord)
    records.w0.jsonl ...    one line per finished request, one file per worker (RequestRecord)
    health.w0.jsonl ...     how the worker felt (WorkerSample)
    recount.jsonl           output tokens by the client's tokenizer, where the server told none (Recount)
    server.jsonl            /metrics readings (ScrapeRecord)

Only the last line of a file can be torn, and a torn line is skipped (and cut off before a resumed run appends).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from paceline.errors import ConfigError
from paceline.measure.claims import await_writers, lock
from paceline.measure.records import Manifest, Phase, Recount, RequestRecord, ScrapeRecord, WorkerSample

T = TypeVar("T")
MANIFEST = "manifest.json"
SCHEDULE = "schedule.jsonl"
_FIXED = (MANIFEST, f"{MANIFEST}.new", SCHEDULE, "warmup.jsonl", "recount.jsonl", "server.jsonl")
_BY_WORKER = ("records.w", "health.w")


class RowWriter:
    """Appends rows to one JSON-lines file. Each line goes to the kernel when `flush` is called, or on close."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=1 << 16)
        if not lock(self._file.fileno()):
            self._file.close()
            raise ConfigError(f"another process is writing {path}")
        cut_torn_line(path)
        self._encoder = msgspec.json.Encoder()

    def write(self, row: Any) -> None:
        self._file.write(self._encoder.encode(row) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Remove an unfinished last line, so that the next append starts a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            file.truncate(end)


def read_rows(path: Path, row: type[T]) -> Iterator[T]:
    """The rows of one file. A torn last line is skipped; a broken line elsewhere is an error that names it."""
    decoder = msgspec.json.Decoder(row)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: not a {row.__name__} row: {error}") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader or a crash sees the old or the new one, never half of either."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def refuse_taken(path: Path) -> None:
    """Raise ConfigError for a folder that holds a run, or where none can be made, before any time is spent."""
    if (path / MANIFEST).exists():
        raise ConfigError(f"{path} already holds a run; choose another folder, or resume it")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{there} is a file, not a folder for results")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into {there}: permission denied")


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it; the new ones, deepest first. Raises ConfigError."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from None
    return made


def remove_run(path: Path, made: list[Path]) -> None:
    """Undo a run that never began: its files, and the folders made for it. What others put there is left alone."""
    for file in (path / MANIFEST, *path.glob("*.jsonl"), path / f"{MANIFEST}.new"):
        if file.name in _FIXED or file.name.startswith(_BY_WORKER):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # no longer empty: somebody else uses it
        for place in made:
            place.rmdir()


class RunFolder:
    """A run on disk. `create` for a new one, the constructor for one that is there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.manifest = msgspec.json.decode((self.path / MANIFEST).read_bytes(), type=Manifest)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path} is not a run folder: it has no {MANIFEST}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.path / MANIFEST} cannot be read: {error}") from None

    @classmethod
    def create(cls, path: str | Path, manifest: Manifest) -> RunFolder:
        """Make the folder. One that already holds a run is refused, never overwritten."""
        folder = Path(path)
        refuse_taken(folder)
        make_folder(folder)
        write_atomically(folder / MANIFEST, msgspec.json.encode(manifest))
        return cls(folder)

    def settle(self) -> None:
        """Wait for workers of a runner that was killed, which may still be writing their last lines."""
        await_writers([*self._files("records"), *self._files("health")])

    def save_manifest(self) -> None:
        """Write `self.manifest` as it is now."""
        write_atomically(self.path / MANIFEST, msgspec.json.format(msgspec.json.encode(self.manifest), indent=2))

    def records_path(self, worker: int) -> Path:
        return self.path / f"records.w{worker}.jsonl"

    def health_path(self, worker: int) -> Path:
        return self.path / f"health.w{worker}.jsonl"

    @property
    def warmup_path(self) -> Path:
        return self.path / "warmup.jsonl"

    @property
    def recount_path(self) -> Path:
        return self.path / "recount.jsonl"

    @property
    def server_path(self) -> Path:
        return self.path / "server.jsonl"

    @property
    def schedule_path(self) -> Path:
        return self.path / SCHEDULE

    def _files(self, stem: str) -> list[Path]:
        return sorted(self.path.glob(f"{stem}.w*.jsonl"), key=lambda p: int(p.name.split(".w")[1].split(".")[0]))

    def iter_records(self) -> Iterator[RequestRecord]:
        """All rows, warm-up too, file by file."""
        for path in (self.warmup_path, *self._files("records")):
            yield from read_rows(path, RequestRecord)

    def records(self, phase: Phase | None = Phase.MEASURE) -> list[RequestRecord]:
        """Rows of one phase (None: all) in order of their scheduled time.

        Where a request was cut off and ran again in a later segment, only its last row counts.
        """
        last: dict[tuple[Phase, str], RequestRecord] = {}
        for record in self.iter_records():
            if phase is not None and record.phase is not phase:
                continue
            key = (record.phase, record.id)
            if key not in last or last[key].segment <= record.segment:
                last[key] = record
        counts = {row.id: row.tokens for row in read_rows(self.recount_path, Recount)}
        rows = [
            msgspec.structs.replace(row, client_tokens=counts[row.id])
            if row.phase is Phase.MEASURE and row.id in counts
            else row
            for row in last.values()
        ]
        return sorted(rows, key=lambda r: (r.scheduled_s, r.index, r.turn))

    def samples(self) -> list[WorkerSample]:
        """Health of all workers in order of time."""
        rows = [row for path in self._files("health") for row in read_rows(path, WorkerSample)]
        return sorted(rows, key=lambda r: (r.segment, r.t_s, r.worker))

    def scrapes(self) -> list[ScrapeRecord]:
        return list(read_rows(self.server_path, ScrapeRecord))
