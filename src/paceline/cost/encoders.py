"""Families of models that have an encoder: they read a text from both sides, and are not what is modelled here."""

from __future__ import annotations

# What the names of their families hold: a text is read at once, nothing is decoded one token after another.
_ENCODERS = ("bert", "electra", "mpnet", "longformer", "big_bird", "xlnet", "clip", "wav2vec", "t5encoder")
_TWO_SIDED = frozenset(
    {
        *("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "pegasus", "marian", "m2m_100"),
        *("whisper", "led", "prophetnet", "fsmt", "blenderbot", "seamless_m4t"),
    }
)


def encoder_kind(family: str, *, two_sided: bool = False) -> str:
    """What a family (`model_type`, a GGUF architecture) is that has an encoder, in words; empty for a decoder.

    `two_sided`: its config says that it has an encoder and a decoder.
    """
    name = family.lower().replace("-", "_")
    if two_sided or name in _TWO_SIDED:
        return "an encoder with a decoder"
    if "decoder" in name:  # modernbert-decoder
        return ""
    return "an encoder" if any(word in name for word in _ENCODERS) else ""
