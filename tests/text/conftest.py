"""Tokenizers for the text tests: the default model's own, and small ones of every other kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from paceline.text.tokenizer import Tokenizer

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_folder() -> Path:
    """Where the default model's file is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "models"


@pytest.fixture(scope="session")
def default_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer, exported from its GGUF file."""
    if not (model_folder() / MODEL_FILE).is_file():
        pytest.skip(f"{MODEL_FILE} is not in the cache; run `paceline pull` first")
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(str(model_folder()), gguf_file=MODEL_FILE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def default_tokenizer(default_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(default_tokenizer_dir)


SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = ["▁hello", "▁world", "▁", "he", "llo", "▁▁", "wor", "ld", "x", "é", "你", ".", "▁a", "b"]


def byte_fallback_bpe() -> FastTokenizer:
    """Llama-2 style: byte fallback, fused, one leading space stripped."""
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return fast


def gemma_like() -> FastTokenizer:
    """Byte fallback without stripping."""
    fast = byte_fallback_bpe()
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def metaspace_unigram(scheme: str) -> FastTokenizer:
    """T5 or XLM style."""
    fast = FastTokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate([*SPECIALS, *WORDS])], unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return fast


def suffix_bpe() -> FastTokenizer:
    """End-of-word suffixes: no kind that the decoder knows by name."""
    vocab = {p: i for i, p in enumerate([*SPECIALS, "hello</w>", "world</w>", "he", "x</w>", "y", ".</w>"])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    fast.decoder = decoders.BPEDecoder(suffix="</w>")
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return fast


def byte_level_with_odd_tokens() -> FastTokenizer:
    """Byte-level pieces that are halves of characters, and added tokens that are no byte-level text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *alphabet, "Ġhello", "ä½", "ðŁ"])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    fast.add_tokens([AddedToken("new word", normalized=False), AddedToken("é", normalized=False), AddedToken("你")])
    return fast


KINDS: dict[str, Any] = {
    "byte_fallback": byte_fallback_bpe,
    "gemma": gemma_like,
    "metaspace_always": lambda: metaspace_unigram("always"),
    "metaspace_first": lambda: metaspace_unigram("first"),
    "metaspace_never": lambda: metaspace_unigram("never"),
    "suffix": suffix_bpe,
    "byte_level": byte_level_with_odd_tokens,
}
EOS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="session")
def small_tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make(), EOS, None) for name, make in KINDS.items()}
