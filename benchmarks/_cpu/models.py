"""The models that are measured: their shapes, and the bytes and operations that a step of them cannot do without."""

from __future__ import annotations

from dataclasses import dataclass

BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "int4": 5.0}  # int4 as Q4_1: two scales for 32
HEAD_BITS = {**BITS, "int4": 8.0}  # the head of a Q4_1 file is Q8_0


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped heads, a gated MLP, and a head that shares the embedding's weights."""

    name: str
    architecture: str  # of GGUF: "llama" or "qwen2"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int  # of the MLP
    vocab: int
    rope_base: float
    eps: float
    head_dim: int = 64
    context: int = 8192

    @property
    def map_weights(self) -> int:
        """Weights of all layers' maps; what every token of a step is multiplied with."""
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out = self.head_dim * self.heads * self.hidden
        return self.layers * (qkv + out + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        """Weights of the head, which only rows that sample are multiplied with."""
        return self.vocab * self.hidden

    def weight_bytes(self, precision: str) -> float:
        """Bytes of weights that a step reads, whatever its rows: each once. Scales of int8 are not counted."""
        return (self.map_weights * BITS[precision] + self.head_weights * HEAD_BITS[precision]) / 8

    def kv_bytes(self, tokens: int, per_value: int = 4) -> int:
        """Bytes of the keys and values of so many tokens."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_dim * per_value

    def attention_operations(self, cached: int, new: int) -> int:
        """Multiplications and additions of `new` queries behind `cached` tokens, causal."""
        pairs = cached * new + new * (new + 1) // 2
        return 4 * pairs * self.heads * self.head_dim * self.layers

    def prefill_operations(self, tokens: int) -> int:
        """Of a prompt: every map at every token, the head at the last one only, attention."""
        return 2 * (self.map_weights * tokens + self.head_weights) + self.attention_operations(0, tokens)

    def decode_operations(self, rows: int, context: int) -> int:
        """Of a step of `rows` decodes, each behind `context` tokens."""
        return rows * (2 * (self.map_weights + self.head_weights) + self.attention_operations(context, 1))


DEFAULT = Shape(
    name="smollm2-135m",
    architecture="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    inner=1536,
    vocab=49152,
    rope_base=1e5,
    eps=1e-5,
)
# The shapes of Qwen2.5-0.5B and Llama-3.2-1B with random weights; without Llama's rope scaling, which costs nothing.
RANDOM = (
    Shape("qwen2.5-0.5b-shaped", "qwen2", 24, 896, 14, 2, 4864, 151936, 1e6, 1e-6),
    Shape("llama-3.2-1b-shaped", "llama", 16, 2048, 32, 8, 8192, 128256, 5e5, 1e-5),
)
SHAPES = {shape.name: shape for shape in (DEFAULT, *RANDOM)}
