"""What a folder calls its special tokens; the tokenizer itself, with its vocabulary, takes longer to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel

# The named special tokens that chat templates may mention.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts by name, e.g. {"eos_token": "</s>"}; each is a string or {"content": string} in the files.

    Raises CorruptModel for a file that cannot be read.
    """
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file. Raises CorruptModel if it cannot be read."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptModel(f"{file} cannot be read: {error}") from error
    except RecursionError:
        raise CorruptModel(f"{file} cannot be read: nested too deeply") from None
    if not isinstance(content, dict):
        raise CorruptModel(f"{file} should hold one JSON object")
    return content
