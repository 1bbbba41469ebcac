"""What whole layers compute, composed from the references of the kernels that they are made of; see `contracts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline_native.contracts import Array, Contract, Doubles, Tensor, attention, linear, rms_norm, rope


@dataclass(frozen=True, slots=True)
class LayerCase:
    """A batch as in `AttentionCase`, and the shape of the layers it goes through."""

    rows: tuple[tuple[int, int], ...]
    hidden: int = 40
    inner: int = 72
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    rotary: int = 16
    block_size: int = 4
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of `DecoderLayer`; the maps as (weight, bias), channels as in `linear`, gate before up."""

    attention_norm: Array
    qkv: tuple[Array, Array | None]
    out: tuple[Array, Array | None]
    mlp_norm: Array
    gate_up: tuple[Array, Array | None]
    down: tuple[Array, Array | None]
    qk_norm: Array | None = None


def decoder_layer(
    hidden: Array,
    weights: LayerWeights,
    cos: Array,
    sin: Array,
    cached: Sequence[tuple[Array, Array]],
    counts: Sequence[int],
    *,
    eps: float,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    activation: str = "silu",
    rounded: Callable[[Array], Array] = lambda x: x,
) -> Doubles:
    """`hidden` after the layer.

    hidden [tokens, hidden]: `counts[r]` tokens of each row r, whose keys and values [n, kv_heads, dim] of earlier
    positions are `cached[r]`. `rounded` is what activations become before a map, see `dequantized_rows`.
    """
    tokens, rotating = len(hidden), heads + kv_heads
    qkv = linear(rounded(rms_norm(hidden, weights.attention_norm, eps)), *weights.qkv)
    qkv = qkv.reshape(tokens, rotating + kv_heads, weights.out[0].shape[1] // heads)
    turned, v = qkv[:, :rotating], qkv[:, rotating:]
    if weights.qk_norm is not None:
        turned = rms_norm(turned, weights.qk_norm, eps)
    turned = rope(turned, cos, sin)
    q, k = turned[:, :heads], turned[:, heads:]
    mixed = np.zeros_like(q)
    first = 0
    for (keys, values), count in zip(cached, counts, strict=True):
        part = slice(first, first + count)
        context = np.concatenate((keys, k[part])), np.concatenate((values, v[part]))
        mixed[part] = attention(q[part], *context, len(keys), scale=scale, window=window)
        first += count
    hidden = linear(rounded(mixed.reshape(tokens, weights.out[0].shape[1])), *weights.out, residual=hidden)
    normal = rounded(rms_norm(hidden, weights.mlp_norm, eps))
    inner = linear(normal, *weights.gate_up, activation=activation, gated=True)
    return linear(rounded(inner), *weights.down, residual=hidden)


def largest_of_rows(x: Array) -> Doubles:
    """Each row's largest magnitude, in all its places: sums over whole rows mix the errors of a layer."""
    largest: Doubles = np.broadcast_to(np.abs(x).max(axis=1, keepdims=True, initial=0), x.shape).astype(np.float64)
    return largest


LAYER_CASES = (
    LayerCase(((0, 1),)),
    LayerCase(((33, 1), (0, 7), (5, 1), (2, 3)), bias=True, window=4, activation="gelu_tanh"),
    LayerCase(((3, 1), (0, 1)), hidden=33, inner=31, heads=3, kv_heads=3, head_dim=10, rotary=6, qk_norm=True),
    LayerCase(((0, 70), (300, 1)), hidden=96, inner=160, heads=4, kv_heads=1, head_dim=32, rotary=32, block_size=16),
    LayerCase(((1, 2),), qk_norm=True, bias=True, rotary=8, activation="relu", block_size=1),
    LayerCase(((7, 260),), hidden=64, inner=128, heads=4, kv_heads=2, window=33, block_size=16),
    LayerCase((), qk_norm=True),
)

DECODER_LAYER = Contract(
    name="run_layers",
    formula="h += out(attention(rope(norm(qkv(norm(h)))))); h += down(act(gate(norm(h))) * up(norm(h))); a layer each",
    inputs={
        "hidden": Tensor("float32", ("tokens", "hidden")),
        "cos": Tensor("float32", ("tokens", "rotary")),
        "sin": Tensor("float32", ("tokens", "rotary")),
        "keys": Tensor("float32", ("blocks", "block_size", "kv_heads", "head_dim")),
        "values": Tensor("float32", ("blocks", "block_size", "kv_heads", "head_dim")),
        "slots": Tensor("int64", ("tokens",)),
        "tables": Tensor("int64", ("rows", "most_blocks")),
        "row_starts": Tensor("int64", ("rows + 1",)),
        "context_lens": Tensor("int64", ("rows",)),
        "wanted": Tensor("int64", ("wanted",)),
    },
    output=Tensor("float32", ("wanted or tokens", "hidden")),
    slack=1e-5,
    reference=decoder_layer,
    magnitude=lambda *args, **kwargs: largest_of_rows(decoder_layer(*args, **kwargs)),
    samples=(),  # ragged: see LAYER_CASES
)
