"""A folder with the tokenizer of a model, in the files that the text room reads without torch or transformers.

A Hugging Face folder that has tokenizer.json is used as it is. A GGUF file, or a folder whose tokenizer is only a
slow one, is converted by transformers once, and the result kept with a note of what it was made from.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.digest import files_digest
from paceline.runtime.formats.folder import TOKENIZER_FILES, read_json
from paceline.text.special_tokens import special_tokens

# Says what a converted tokenizer was made from; a conversion of anything else is made anew.
_NOTE = "made_from.txt"
# Part of the note: another way of converting makes earlier results stale.
_FORMAT = "1"


def export_tokenizer(
    model_path: str | Path, out_dir: str | Path, *, vocab_size: int | None = None, content: str | None = None
) -> Path:
    """The folder with the model's tokenizer.json and tokenizer_config.json (chat template, special tokens).

    That is the model's own folder where it has them; else `out_dir`, filled in one step, or left alone where it holds
    the tokenizer of the same content already. `vocab_size` checks that the tokenizer fits the model. `content` is the
    digest of the checkpoint's files, where the caller knows it: then what the tokenizer is made from is read only to
    make it.

    Raises ModelNotFound, UnsupportedModel where nothing can convert the tokenizer, and CorruptModel where it cannot be
    read or does not fit; ConfigError where `out_dir` holds something else.
    """
    source, target = Path(model_path), Path(out_dir)
    if source.is_file():
        folder = _from_gguf(source, target, content)
    elif not source.is_dir():
        raise ModelNotFound(f"{source}: no such file or folder")
    elif (source / "tokenizer.json").is_file():
        folder = source
    else:
        folder = _convert(source, target, content or _folder_digest(source), source)
    if vocab_size is not None:
        read_eos_token_ids(folder, vocab_size)
    return folder


def kept_tokenizer(out_dir: Path, content: str) -> Path | None:
    """`out_dir` if it holds the tokenizer of a checkpoint with this digest, as `export_tokenizer` left it."""
    return out_dir if _made_from(out_dir) == _note(content) else None


def read_eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text, by the word of the folder's tokenizer: none or one.

    Raises CorruptModel if the tokenizer can give ids that a model of `vocab_size` has no logits for.
    """
    content = read_json(folder / "tokenizer.json")
    added = [entry for entry in content.get("added_tokens") or () if isinstance(entry.get("id"), int)]
    vocab = (content.get("model") or {}).get("vocab") or {}
    ids = [entry["id"] for entry in added]
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # a Unigram model's: [text, score] each
    if not ids:
        raise CorruptModel(f"{folder / 'tokenizer.json'}: a tokenizer without a vocabulary")
    if max(ids) >= vocab_size:
        raise CorruptModel(
            f"{folder}: the tokenizer does not fit the model: it has ids up to {max(ids)}, "
            f"the model's vocabulary ends at {vocab_size - 1}"
        )
    eos = special_tokens(folder).get("eos_token")
    found = [entry["id"] for entry in added if entry.get("content") == eos]
    if isinstance(vocab, dict):
        found += [vocab[eos]] if eos in vocab else []
    else:
        found += [number for number, entry in enumerate(vocab) if entry[:1] == [eos]]
    return tuple(found[:1])


def _from_gguf(source: Path, target: Path, content: str | None) -> Path:
    if content is not None and kept_tokenizer(target, content) is not None:
        return target
    # Imported here: it imports torch, and a conversion that is there needs none of it.
    from paceline.runtime.formats.gguf_file import GGUFFile

    file = GGUFFile(source)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModel(f"{source}: no tokenizer in this file; use the model's Hugging Face folder instead")
    digest = content or file.header_digest()
    return _convert(source, target, digest, source.parent, limit=len(tokens), gguf_file=source.name)


def _folder_digest(source: Path) -> str:
    """Of the files a slow tokenizer is made from."""
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        raise UnsupportedModel(f"{source}: no tokenizer here (neither tokenizer.json nor one that can be converted)")
    return files_digest(files)


def _convert(source: Path, target: Path, digest: str, folder: Path, *, limit: int | None = None, **where: Any) -> Path:
    """`target` with the tokenizer that transformers finds in `folder`, made now unless it is there.

    `limit` is how many tokens the source has; tokens beyond it are the converter's and are dropped.
    """
    note = _note(digest)
    made_from = _made_from(target)
    if made_from == note:
        return target
    if made_from is None and target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target}: not a folder of converted tokenizers, so it is not replaced; name another")
    # Imported here: it takes seconds, and a conversion that is there needs none of it.
    from transformers import AutoTokenizer

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"the converted tokenizer of {source} cannot be stored in {target.parent}: {error.strerror}; give "
            "XDG_CACHE_HOME a folder that can be written, or one that has it already"
        ) from error
    try:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **where)
            tokenizer.save_pretrained(part)
        except Exception as error:  # many kinds, from many converters; all mean that there is no tokenizer to use
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedModel(f"{source}: transformers cannot convert its tokenizer: {reason}") from error
        if not (part / "tokenizer.json").is_file():
            raise UnsupportedModel(f"{source}: its tokenizer has no fast form (no tokenizer.json came of it)")
        if limit is not None:
            _drop_inventions(part, limit)
        (part / _NOTE).write_text(note, encoding="utf-8")
        part.chmod(0o755)
        _publish(part, target, note)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _drop_inventions(folder: Path, limit: int) -> None:
    """Remove added tokens with ids from `limit` on.

    The class that transformers builds for a byte-level vocabulary adds its own default special token where the file
    has none of that name (Llama 3's, for one): an id for which the model has no embedding.
    """
    path = folder / "tokenizer.json"
    content = read_json(path)
    added = content.get("added_tokens") or []
    invented = {entry["content"] for entry in added if entry["id"] >= limit}
    if not invented:
        return
    content["added_tokens"] = [entry for entry in added if entry["id"] < limit]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    kept = {
        key: value
        for key, value in read_json(settings).items()
        if not (key.endswith("_token") and isinstance(value, str) and value in invented)
    }
    settings.write_text(json.dumps(kept, ensure_ascii=False, indent=2), encoding="utf-8")


def _note(digest: str) -> str:
    """What a conversion is kept under: its source, and what may convert it in another way."""
    return f"{_FORMAT} transformers-{version('transformers')} {digest}\n"


def _made_from(target: Path) -> str | None:
    """The note in a converted tokenizer's folder. It is in place only once everything else is."""
    try:
        return (target / _NOTE).read_text(encoding="utf-8")
    except OSError:
        return None


def _publish(part: Path, target: Path, note: str) -> None:
    """Move a finished folder into place, over one that was made from something else.

    Another process may do the same at the same time: whoever loses finds what it was about to put there.
    """
    for _ in range(2):
        try:
            part.rename(target)
            return
        except OSError:
            if _made_from(target) == note:
                return
            stale = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".stale", dir=target.parent))
            target.rename(stale)
            shutil.rmtree(stale, ignore_errors=True)
    part.rename(target)
