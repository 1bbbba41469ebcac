"""Ids to text, a token at a time, equal to decoding all of them at once.

A decoder takes one token at a time and gives the text that is now certain: whatever comes later can no longer change
it. `flush` gives the rest. For any ids, the pieces joined are exactly what the tokenizer's own `decode` of the whole
list returns. Three kinds cover the checkpoints people use; `make_decoder_factory` picks by the tokenizer's own
description of its decoder.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """State of one text being decoded. Special tokens that are to be skipped are never pushed."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that has become certain, possibly ""."""
        ...

    def flush(self) -> str:
        """Return what was held back. Nothing is pushed afterwards."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes instead of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHAR = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a piece of a byte-level vocabulary stands for.

    A piece with any character outside the alphabet (an added token, say) stands for its own UTF-8.
    """
    try:
        return bytes([BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte of a `<0xE4>` piece, None for any other piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


class ByteLevelDecoder:
    """Every token is some bytes; a character is shown once all its bytes are there."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """SentencePiece style: a marker for spaces, `<0xNN>` pieces for bytes, a leading space that is dropped.

    A run of byte pieces is one unit: the tokenizer decodes it as UTF-8, or, if any part of it is malformed, shows one
    replacement character for each byte. So the run is held until a piece that is no byte ends it.
    """

    def __init__(self, piece: Callable[[int], str], *, byte_fallback: bool, strip: int, drop_first: str) -> None:
        """`strip`: spaces to drop at the very start; `drop_first`: a character dropped from the first piece alone."""
        self._piece = piece
        self._byte_fallback = byte_fallback
        self._strip = strip
        self._drop_first = drop_first
        self._run = bytearray()
        self._first = True

    def push(self, token: int) -> str:
        piece = self._piece(token)
        if self._first:
            self._first = False
            if self._drop_first:
                piece = piece.replace(self._drop_first, "")
        byte = fallback_byte(piece) if self._byte_fallback else None
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._lead(self._end_run() + piece)

    def flush(self) -> str:
        return self._lead(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _lead(self, text: str) -> str:
        """Drop up to `strip` leading spaces of the whole text, wherever the pieces border."""
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


class WindowDecoder:
    """Any other tokenizer: decodes a short window twice and shows by how much the text grew.

    The window starts one shown piece back, so that a decoder which treats the first token of a text differently sees
    a token before the new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # how many of `_ids` have been shown

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._grow(final=False)

    def flush(self) -> str:
        return self._grow(final=True)

    def _grow(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._shown])
        now = self._decode(self._ids)
        if len(now) <= len(before) or (not final and now.endswith(REPLACEMENT)):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


class DecoderKind:
    """How a tokenizer's ids become text: what one token stands for, and a fresh decoder for a whole text."""

    def __init__(
        self,
        description: dict[str, Any] | None,
        piece: Callable[[int], str],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """`description` is the "decoder" entry of tokenizer.json; `decode` keeps special tokens."""
        self._piece = piece
        self._decode = decode
        self._marker = ""
        self._byte_fallback = False
        self._strip = 0
        self._drop_first = ""
        steps = _steps(description)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            self.name = "byte-level"
        elif self._read_pieces(steps):
            self.name = "pieces"
        else:
            self.name = "window"

    def _read_pieces(self, steps: list[dict[str, Any]]) -> bool:
        """Whether the steps are SentencePiece-like; sets what they say."""
        fused = False
        for step in steps:
            match step:
                case {"type": "Metaspace", "replacement": str(marker)} if len(steps) == 1:
                    self._marker = marker
                    if step.get("prepend_scheme", "always") != "never":
                        self._drop_first = " "
                    return True
                case {"type": "Replace", "pattern": {"String": str(marker)}, "content": " "} if not self._marker:
                    self._marker = marker
                case {"type": "ByteFallback"} if not fused:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                    self._strip = start
                case _:
                    return False
        return bool(self._marker) and fused

    def shown_piece(self, token: int) -> str:
        """The piece of `token` with its space marker as a space."""
        piece = self._piece(token)
        return piece.replace(self._marker, " ") if self._marker else piece

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text when it is not the first."""
        if self.name == "byte-level":
            return byte_level_bytes(self._piece(token))
        if self.name == "pieces":
            byte = fallback_byte(self._piece(token)) if self._byte_fallback else None
            return self.shown_piece(token).encode() if byte is None else bytes([byte])
        return self._decode([token]).encode()

    def start(self, token_bytes: Callable[[int], bytes]) -> TokenDecoder:
        """A decoder for a new text; `token_bytes` may be a cached version of this object's."""
        if self.name == "byte-level":
            return ByteLevelDecoder(token_bytes)
        if self.name == "pieces":
            return PieceDecoder(
                self.shown_piece,
                byte_fallback=self._byte_fallback,
                strip=self._strip,
                drop_first=self._drop_first,
            )
        return WindowDecoder(self._decode)
