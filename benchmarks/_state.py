"""Results that are kept by name, so that a benchmark that was interrupted goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class State:
    """Where results are kept; what is there is not measured again."""

    folder: Path

    def get(self, key: str) -> Any:
        path = self._path(key)
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, key: str, value: Any) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._path(key).with_suffix(".part")
        part.write_text(json.dumps(value, indent=1))
        part.replace(self._path(key))  # a kill leaves the whole result or none
        return value

    def scratch(self, key: str) -> Path:
        """A folder for a run's records; one left by an interruption is put aside under the next number."""
        base = self.folder / "runs" / slug(key)
        number = 0
        while (path := base.with_name(f"{base.name}-{number}")).exists():
            number += 1
        return path

    def _path(self, key: str) -> Path:
        return self.folder / f"{slug(key)}.json"


def slug(key: str) -> str:
    """A key as the name of a file."""
    return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in key)
