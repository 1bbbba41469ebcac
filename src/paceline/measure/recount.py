"""Counting answers with a tokenizer of our own, where the server tells no usage. After the run, never on its clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.measure.folder import RowWriter, RunFolder
from paceline.measure.records import Recount, RequestRecord


def load_tokenizer(path: Path) -> Any:
    """A tokenizer.json, or the one in a folder. Raises ConfigError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"there is no tokenizer at {file}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"cannot read the tokenizer {file}: {error}") from None


def recount(folder: RunFolder, records: list[RequestRecord], path: Path) -> str:
    """Write the counts of successful answers without usage; the tokenizer's name for the manifest.

    Special tokens are not added: an answer has no beginning-of-sequence token. Several choices count together, as
    usage counts them.
    """
    tokenizer = load_tokenizer(path)
    folder.recount_path.unlink(missing_ok=True)
    missing = [
        r for r in records if r.ok and r.text is not None and (r.usage is None or r.usage.completion_tokens is None)
    ]
    if missing:
        writer = RowWriter(folder.recount_path)
        for record in missing:
            count = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in _texts(record))
            writer.write(Recount(record.id, count))
        writer.close()
    return path.name if path.name != "tokenizer.json" else path.parent.name


def _texts(record: RequestRecord) -> list[str]:
    """The text of each choice."""
    texts: dict[int, list[str]] = {}
    start = 0
    for i, chars in enumerate(record.row_chars):
        texts.setdefault(record.choice_of(i), []).append((record.text or "")[start : start + chars])
        start += chars
    return ["".join(parts) for parts in texts.values()]
