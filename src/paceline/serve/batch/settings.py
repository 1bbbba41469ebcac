"""What a server allows of batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Resolved. Sizes in bytes or counts, times in seconds."""

    folder: Path | None = None  # where files and batches lie; None: no batches here
    concurrency: int = 32  # requests of batches in the engine's hands at once
    most_waiting: int = 4  # while so many requests wait in the engine, batches hand it nothing
    max_file_bytes: int = 200 << 20
    max_requests: int = 50_000  # in one batch
    max_tenant_bytes: int = 2 << 30  # in all files of a tenant
    max_tenant_files: int = 1000
    max_tenant_batches: int = 20  # that have not ended
    keep_s: float = 30 * 86_400.0  # how long files, and batches that have ended, stay
    sweep_s: float = 30.0  # between looks at what has expired
    upload_timeout_s: float = 900.0
