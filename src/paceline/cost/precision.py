"""How many bits a number takes in memory, and in what format the chip multiplies it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from paceline.errors import ConfigError

BF16_BITS = 16.0


@dataclass(frozen=True, slots=True)
class Precision:
    """A storage format of weights or of the KV cache. `bits` are those of one number, scales included."""

    name: str
    bits: float
    multiply: str = "bf16"  # the format it is multiplied in, where the chip can; else bf16 after conversion
    # What is stored so: "linear" leaves embeddings and head at 16 bits, as checkpoints of servers do; "experts" also
    # leaves attention; "all" is everything, as GGUF files are.
    scope: str = "linear"

    @property
    def bytes(self) -> float:
        """Bytes of one number."""
        return self.bits / 8.0

    def multiplied_in(self, formats: Mapping[str, float]) -> str:
        """The format of the multiplication on a chip whose matrix units know `formats`, with the rate of each.

        A narrow one that is slower than bf16 (int8 on a B300) is not used: engines convert the weights instead.
        """
        rate = formats.get(self.multiply, 0.0)
        too_slow = self.bits < BF16_BITS and rate < formats.get("bf16", 0.0)
        return "bf16" if not rate or too_slow else self.multiply


# Scales: of int4 16 + 4 bits in 128 numbers (AWQ, GPTQ), of mxfp4 8 bits in 32 (OCP MX v1.0), of nvfp4 8 bits in 16.
# GGUF mixtures: file size over parameters of Llama-3-8B as llama.cpp's quantize tool lists them.
PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp32", 32.0, "fp32", "all"),
        Precision("bf16", 16.0, "bf16", "all"),
        Precision("fp16", 16.0, "bf16", "all"),
        Precision("fp8", 8.0, "fp8"),
        Precision("int8", 8.0, "int8"),
        Precision("w8a16", 8.0),
        Precision("int4", 4.16),
        Precision("mxfp4", 4.25, "fp4", "experts"),
        Precision("nvfp4", 4.5, "fp4"),
        Precision("q8_0", 8.5, scope="all"),
        Precision("q6_k", 6.57, scope="all"),
        Precision("q5_k_m", 5.70, scope="all"),
        Precision("q4_k_m", 4.89, scope="all"),
        Precision("q4_0", 4.64, scope="all"),
        Precision("q3_k_m", 4.00, scope="all"),
        Precision("q2_k", 3.16, scope="all"),
    )
}
_ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_block": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "fp4": "nvfp4",
    "8": "fp8",
    "16": "bf16",
    "4": "int4",
}
_BITS = re.compile(r"(\d+(?:\.\d+)?) ?bits?")


@cache  # it is asked for several times in every prediction
def find_precision(name: str, *, what: str = "precision") -> Precision:
    """The precision called `name`; "4.5bit" is any number of bits over all weights. ConfigError names the nearest."""
    key = name.strip().lower().replace("-", "_")
    key = _ALIASES.get(key, key)
    if key in PRECISIONS:
        return PRECISIONS[key]
    match = _BITS.fullmatch(key)
    if match and 0.0 < float(match[1]) <= 64.0:
        return Precision(key, float(match[1]), scope="all")
    near = difflib.get_close_matches(key, [*PRECISIONS, *_ALIASES], 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    known = ", ".join(PRECISIONS)
    raise ConfigError(f"{what} {name!r} is not known{hint} (known: {known}, or a number of bits such as 4.5bit)")
