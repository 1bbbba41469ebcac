"""A model folder in Hugging Face's layout: its JSON files and what they say about where generation ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, ModelNotFound
from paceline.runtime.formats.config import token_ids

# What a tokenizer and a chat template are made from, as far as a folder has them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tekken.json",
)

# Quantized forms that transformers unpacks while it reads, to run as any other model does.
UNPACKED = ("mxfp4",)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CorruptModel if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptModel(f"{path}: not readable as JSON ({error})") from error
    except RecursionError:
        raise CorruptModel(f"{path}: not readable as JSON (nested too deeply)") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path}: expected a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ModelNotFound where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no config.json here, so this is not a model folder")
    return read_json(path)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """How a config.json says the weights are quantized; None where they are not."""
    found = config.get("quantization_config")
    if not found:
        return None
    return str(found.get("quant_method")) if isinstance(found, Mapping) else str(found)


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text or a turn: from generation_config.json, config.json and the tokenizer, in that order.

    Chat models often name the end of a turn in one of these alone.
    """
    generation = folder / "generation_config.json"
    ids = list(token_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ())
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, Mapping) else {}):
        ids += token_ids(part.get("eos_token_id"))
    eos = _tokenizer_eos(folder)
    return tuple(dict.fromkeys(ids if eos is None else (*ids, eos)))


def _tokenizer_eos(folder: Path) -> int | None:
    """Id of the `eos_token` that tokenizer_config.json names, looked up in the files that know ids."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    settings = read_json(path)
    token = settings.get("eos_token")
    if isinstance(token, Mapping):  # written with its flags
        token = token.get("content")
    if not isinstance(token, str):
        return None
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, Mapping) and entry.get("content") == token:
            return int(key)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    content = read_json(tokenizer)
    for entry in content.get("added_tokens") or ():
        if entry.get("content") == token:
            return int(entry["id"])
    vocab = (content.get("model") or {}).get("vocab")
    found = vocab.get(token) if isinstance(vocab, Mapping) else None
    return found if isinstance(found, int) else None
