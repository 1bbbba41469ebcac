"""A checkpoint's tokenizer, from the files beside its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from paceline.errors import CorruptModel, ModelNotFound
from paceline.text.chat import ChatTemplate
from paceline.text.decoding import DecoderKind, TokenDecoder
from paceline.text.special_tokens import read_json, special_tokens


class Tokenizer:
    """Text to ids and back, with the chat template of the checkpoint.

    Thread-safe: nothing changes after construction but a cache of what tokens look like.
    """

    def __init__(self, fast: Any, special: dict[str, str], template: str | None) -> None:
        """`fast`: a `tokenizers.Tokenizer`; `special`: e.g. {"eos_token": "</s>"}; `template`: jinja source."""
        self._fast = fast
        self.special_tokens = special
        self.chat_template = ChatTemplate(template, special) if template is not None else None
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        added: dict[int, Any] = fast.get_added_tokens_decoder()
        # Skipping goes by the text of a token, as in the library: two ids may share one.
        special_texts = {token.content for token in added.values() if token.special}
        self._special_ids = frozenset(i for i in added if fast.id_to_token(i) in special_texts)
        eos = special.get("eos_token")
        eos_id = fast.token_to_id(eos) if eos is not None else None
        self.eos_token_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        # The decoder pickles as its entry of tokenizer.json; `fast.to_str()` would write the whole vocabulary for it.
        description = None if fast.decoder is None else json.loads(fast.decoder.__getstate__())
        self._kind = DecoderKind(description, self.piece, lambda ids: self.decode(ids, skip_special_tokens=False))
        self._bytes: dict[int, bytes] = {}
        self.longest_token = max((len(piece) for piece in fast.get_vocab()), default=1)  # characters

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json and chat templates.

        Raises ModelNotFound without a tokenizer.json, CorruptModel when a file cannot be used.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelNotFound(f"no tokenizer.json in {folder}; export the tokenizer in the `tokenizers` format first")
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises a plain Exception for every fault
            raise CorruptModel(f"{file} cannot be read: {error}") from error
        # A truncation or padding saved from training would silently cut prompts.
        fast.no_truncation()
        fast.no_padding()
        special = special_tokens(folder)
        # A config may name an ordinary token as, say, its end: from then on it is a special one. Ones that the
        # vocabulary does not have are left out, since the model has no row for a new id.
        known = [token for token in dict.fromkeys(special.values()) if fast.token_to_id(token) is not None]
        fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
        return cls(fast, special, _find_template(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens`, with those that tokenizer.json puts around every text.

        (An `add_bos_token` in the config says nothing more: transformers drops it beside a tokenizer.json, too.)
        """
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary have no text."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def start_decoding(self) -> TokenDecoder:
        """An incremental decoder for one new text."""
        return self._kind.start(self.token_bytes)

    def is_special(self, token: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out."""
        return token in self._special_ids

    def piece(self, token: int) -> str:
        """The vocabulary's own spelling of an id, "" when there is none."""
        piece: str | None = self._fast.id_to_token(token)
        return piece or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this id adds to a text."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._kind.token_bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """How to show one id to people: its text, or `bytes:\\xe4\\xbd` when it is no whole text by itself."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _find_template(folder: Path) -> str | None:
    """The checkpoint's default chat template: its own file first, then the config's entry."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise CorruptModel(f"{file} cannot be read: {error}") from error
    entry = read_json(folder / "tokenizer_config.json").get("chat_template")
    if entry is None:
        entry = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, list):  # several named ones
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[-1].get("template") if named else None
    return entry if isinstance(entry, str) else None
