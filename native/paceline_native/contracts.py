"""What each kernel computes: axes, types, a float64 reference, how far results may be from it, shapes to try.

Tests and benchmarks are made from these. References are numpy and take what the kernel takes; `magnitude` gives the
scale that an error is measured against: |kernel - reference| <= slack * magnitude, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Doubles = NDArray[np.float64]

ACTIVATIONS = ("none", "silu", "gelu_tanh", "relu")
KINDS = ("float32", "bfloat16", "int8", "int4")
GROUPS = (32, 64, 128)
CACHE_KINDS = ("float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument: its type and the names of its axes, outermost first."""

    dtype: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contract:
    """A kernel in data."""

    name: str
    formula: str
    inputs: Mapping[str, Tensor]
    output: Tensor
    slack: float  # of `magnitude`
    reference: Callable[..., Doubles]
    magnitude: Callable[..., Doubles]
    samples: tuple[Mapping[str, int], ...]  # sizes of the axes


def activate(x: Doubles, name: str) -> Doubles:
    """The activation of that name."""
    if name == "silu":
        with np.errstate(over="ignore"):
            x = x / (1 + np.exp(-x))
    elif name == "gelu_tanh":
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    elif name == "relu":
        x = np.maximum(x, 0)
    return x


# ---------------------------------------------------------------------------------------------------- linear


def linear(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str = "none",
    gated: bool = False,
) -> Doubles:
    """act(x W^T + b) + r; gated, the channels are gate and then up, and it is act(gate) * up + r.

    x [rows, inputs], weight [channels, inputs] as `PackedLinear.unpack` gives it, residual [rows, outputs].
    """
    y = x.astype(np.float64) @ weight.astype(np.float64).T
    if bias is not None:
        y = y + bias
    if gated:
        gate, up = np.split(y, 2, axis=1)
        y = activate(gate, activation) * up
    else:
        y = activate(y, activation)
    if residual is not None:
        y = y + residual
    return y


def linear_magnitude(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str = "none",
    gated: bool = False,
) -> Doubles:
    """The same sum of absolute values. No activation here is steeper than 1.13, or larger than its argument."""
    y = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
    if bias is not None:
        y = y + np.abs(bias)
    if gated:
        gate, up = np.split(y, 2, axis=1)
        y = 2 * gate * up
    return y if residual is None else y + np.abs(residual)


def quantize_rows(x: Array, group: int | None = None) -> tuple[Doubles, Doubles]:
    """(q, scale) of activations as int8 and int4 kernels quantize them: symmetric, 127 levels, half to even.

    x [rows, inputs] -> q like x, scale [rows, groups]; one group of all inputs where `group` is None.
    Every step is rounded to float32, as in the kernels.
    """
    rows, inputs = x.shape
    size = inputs if group is None else group
    groups = -(-inputs // size)
    padded = np.zeros((rows, groups * size), dtype=np.float32)
    padded[:, :inputs] = x
    parts = padded.reshape(rows, groups, size)
    most = np.abs(parts).max(axis=2)
    small = most < np.float32(7.5e-37)
    safe = np.where(small, np.float32(1), most)
    inverse = np.where(small, np.float32(0), np.float32(127) / safe)
    scale = np.where(small, np.float32(0), most / np.float32(127))
    q = np.rint(parts * inverse[..., None]).reshape(rows, groups * size)[:, :inputs]
    return q.astype(np.float64), scale.astype(np.float64)


def dequantized_rows(x: Array, group: int | None = None) -> Doubles:
    """x after rounding to what int8 (group None) and int4 kernels multiply with."""
    q, scale = quantize_rows(x, group)
    return q * np.repeat(scale, x.shape[1] if group is None else group, axis=1)[:, : x.shape[1]]


def rounding_bound(x: Array, weight: Array, group: int | None = None) -> Doubles:
    """How far rounding the activations moves x W^T at most: half a step of each times its weight."""
    _, scale = quantize_rows(x, group)
    steps = np.repeat(scale, x.shape[1] if group is None else group, axis=1)[:, : x.shape[1]]
    return 0.5 * steps @ np.abs(weight).astype(np.float64).T


_LINEAR_SIZES = (
    (0, 16, 16),
    (1, 1, 1),
    (1, 576, 192),
    (2, 3, 5),
    (3, 31, 17),
    (4, 33, 15),
    (5, 64, 33),
    (6, 100, 16),
    (7, 128, 100),
    (11, 257, 31),
    (12, 96, 65),
    (13, 130, 64),
    (25, 512, 48),
    (33, 40, 7),
    (130, 1000, 40),
    (512, 72, 24),
)

LINEAR = Contract(
    name="linear",
    formula="act(x W^T + b) + r, or act(gate) * up + r",
    inputs={
        "x": Tensor("float32", ("rows", "inputs")),
        "weight": Tensor("float32, bfloat16, int8 or int4, packed", ("channels", "inputs")),
        "bias": Tensor("float32", ("channels",)),
        "residual": Tensor("float32", ("rows", "outputs")),
    },
    output=Tensor("float32", ("rows", "outputs")),
    slack=2e-6,
    reference=linear,
    magnitude=linear_magnitude,
    samples=tuple({"rows": r, "inputs": i, "outputs": o} for r, i, o in _LINEAR_SIZES),
)

# ------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows of (positions cached before, tokens computed now), and the shape of attention."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    k_dim: int = 64
    v_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def attention(
    q: Array,
    k: Array,
    v: Array,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Doubles:
    """One row. q [n, heads, k_dim] at positions `start` onward, k [s, kv_heads, k_dim], v [s, kv_heads, v_dim]."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for i in range(q.shape[0]):
        last = start + i + 1
        first = 0 if window is None else max(0, last - window)
        for head in range(q.shape[1]):
            shared = head // group
            scores = scale * (k[first:last, shared].astype(np.float64) @ q[i, head].astype(np.float64))
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
            out[i, head] = (weights / total) @ v[first:last, shared].astype(np.float64)
    return out


def attention_magnitude(q: Array, k: Array, v: Array, start: int, *, scale: float, **_: object) -> Doubles:
    """An error of a score is one of its weight: the largest value times (1 + the largest score before its sum)."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], heads, v.shape[2]))
    for head in range(heads):
        keys, values = np.abs(k[:, head // group]), np.abs(v[:, head // group])
        score = scale * (np.abs(q[:, head]).astype(np.float64) @ keys.T.astype(np.float64)).max(axis=1, initial=0)
        out[:, head] = (1 + score)[:, None] * values.max(initial=0)
    return out


def stored(x: Array, kind: str) -> tuple[Array, Array | None]:
    """Keys or values float32 [..., dim] as a pool of that kind keeps them, to the last bit; of int8, and the scales.

    bfloat16 comes as its bits, uint16. Rounded to the nearest, ties to even; int8 is symmetric over a head.
    """
    if kind == "int8":
        q, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
        return q.reshape(x.shape).astype(np.int8), scale.reshape(x.shape[:-1]).astype(np.float32)
    if kind == "bfloat16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), None
    return x.astype(kind), None


def loaded(kept: Array, scales: Array | None) -> Doubles:
    """What such numbers are worth."""
    if kept.dtype == np.uint16:
        kept = (kept.astype(np.uint32) << 16).view(np.float32)
    values = kept.astype(np.float64)
    return values if scales is None else values * scales[..., None].astype(np.float64)


def storing_bound(x: Array, kind: str) -> Doubles:
    """How far a pool may move numbers that are normal in its kind: half a step of the number, or of its head."""
    size = np.abs(x).astype(np.float64)
    if kind == "int8":  # scale, inverse and product are each rounded to float32
        most = size.max(axis=-1, keepdims=True, initial=0)
        return np.broadcast_to(most * (0.5 / 127 + 2.0**-22) + 7.5e-37, x.shape)
    return size * {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[kind]


def attention_rounding_bound(q: Array, k: Array, v: Array, kind: str, *, scale: float) -> Doubles:
    """How far attention over what a pool keeps may be from attention over k and v themselves.

    Scores within d of theirs make weights within a factor e^(2d) of theirs (soft caps are nowhere steeper than 1).
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    moved_k, moved_v = storing_bound(k, kind), storing_bound(v, kind)
    out = np.zeros((q.shape[0], heads, v.shape[2]))
    for head in range(heads):
        shared = head // group
        d = scale * (np.abs(q[:, head]).astype(np.float64) @ moved_k[:, shared].T).max(axis=1, initial=0)
        values = np.abs(v[:, shared]).max(initial=0)
        out[:, head] = np.expm1(2 * d)[:, None] * values + moved_v[:, shared].max(initial=0)
    return out


def in_bfloat16(x: Array) -> Array:
    """x [..., dim] as float32, rounded to bfloat16."""
    return loaded(*stored(x, "bfloat16")).astype(np.float32)


def weight_rounding_bound(v: Array) -> float:
    """How far softmax weights that are rounded to bfloat16 before they meet v may move a result."""
    return float(2.0**-8 * np.abs(v).max(initial=0))


ATTENTION_CASES = (
    AttentionCase(((0, 1),)),
    AttentionCase(((63, 1), (64, 1), (0, 1), (700, 1))),
    AttentionCase(((2100, 1),), kv_heads=1, group=1),
    AttentionCase(((0, 5), (3, 1), (40, 200), (90, 2)), block_size=4),
    AttentionCase(((17, 1), (0, 70), (129, 65)), k_dim=80, v_dim=48, group=1),
    AttentionCase(((5, 1), (0, 9)), k_dim=3, v_dim=5, group=7, kv_heads=1, block_size=1),
    AttentionCase(((300, 1), (300, 40)), window=50),
    AttentionCase(((0, 150),), window=1),
    AttentionCase(((300, 1), (10, 140)), window=129, softcap=5.0, sinks=True),
    AttentionCase(((1, 1), (30, 3)), softcap=20.0),
    AttentionCase(((2000, 1), (8, 30)), sinks=True, group=4, kv_heads=1),
    AttentionCase(((33, 4), (0, 3)), group=9, kv_heads=3, k_dim=128, v_dim=128),
)

ATTENTION = Contract(
    name="paged_attention",
    # Over a bfloat16 pool, a kernel may round queries and softmax weights to bfloat16 too.
    formula="softmax(cap(scale q k^T) over the last `window` positions, and the head's sink) v",
    inputs={
        "q": Tensor("float32", ("tokens", "heads", "k_dim")),
        "k": Tensor("float32", ("tokens", "kv_heads", "k_dim")),
        "v": Tensor("float32", ("tokens", "kv_heads", "v_dim")),
        "keys": Tensor("float32, bfloat16, float16 or int8", ("blocks", "block_size", "kv_heads", "k_dim")),
        "values": Tensor("like keys", ("blocks", "block_size", "kv_heads", "v_dim")),
        "key_scales": Tensor("float32, with int8", ("blocks", "block_size", "kv_heads")),
        "value_scales": Tensor("float32, with int8", ("blocks", "block_size", "kv_heads")),
        "slots": Tensor("int64", ("tokens",)),
        "tables": Tensor("int64", ("rows", "most_blocks")),
        "row_starts": Tensor("int64", ("rows + 1",)),
        "context_lens": Tensor("int64", ("rows",)),
        "sinks": Tensor("float32", ("heads",)),
    },
    output=Tensor("float32", ("tokens", "heads", "v_dim")),
    slack=4e-6,
    reference=attention,
    magnitude=attention_magnitude,
    samples=(),  # ragged: see ATTENTION_CASES
)

# ------------------------------------------------------------------------------------------------ row by row


def rms_norm(x: Array, weight: Array, eps: float) -> Doubles:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    x64 = x.astype(np.float64)
    y: Doubles = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + eps) * weight
    return y


def gate(x: Array, activation: str = "silu") -> Doubles:
    """x [rows, 2 n] -> act(first half) * second half."""
    first, second = np.split(x.astype(np.float64), 2, axis=1)
    y: Doubles = activate(first, activation) * second
    return y


def gate_magnitude(x: Array, activation: str = "silu") -> Doubles:
    first, second = np.split(np.abs(x).astype(np.float64), 2, axis=1)
    y: Doubles = first * second
    return y


def rope(x: Array, cos: Array, sin: Array) -> Doubles:
    """x [rows, heads, dim], cos and sin [rows, rotary]: pairs are (i, i + rotary / 2), the rest passes through."""
    x64, c, s = x.astype(np.float64), cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    rotary = cos.shape[1]
    turned = x64[..., :rotary]
    first, second = np.split(turned, 2, axis=-1)
    turned = turned * c + np.concatenate((-second, first), axis=-1) * s
    y: Doubles = np.concatenate((turned, x64[..., rotary:]), axis=-1)
    return y


def rope_magnitude(x: Array, cos: Array, sin: Array) -> Doubles:
    largest = 2.0 * float(np.abs(x).max(initial=0))
    return rope(np.abs(x), np.abs(cos), np.abs(sin)) + largest


RMS_NORM = Contract(
    name="rms_norm",
    formula="x / sqrt(mean(x^2) + eps) * weight; with a residual, of x + residual, which takes the sum",
    inputs={"x": Tensor("float32", ("rows", "columns")), "weight": Tensor("float32", ("columns",))},
    output=Tensor("float32", ("rows", "columns")),
    slack=1e-6,
    reference=rms_norm,
    magnitude=lambda x, weight, eps: np.abs(rms_norm(x, weight, eps)) + 1e-30,
    samples=tuple(
        {"rows": r, "columns": c}
        for r, c in ((0, 8), (1, 1), (1, 576), (3, 7), (5, 16), (9, 33), (64, 576), (200, 2048))
    ),
)

GATE = Contract(
    name="gate",
    formula="act(x[:, :n]) * x[:, n:]",
    inputs={"x": Tensor("float32", ("rows", "2 columns"))},
    output=Tensor("float32", ("rows", "columns")),
    slack=1e-6,
    reference=gate,
    magnitude=gate_magnitude,
    samples=tuple(
        {"rows": r, "columns": c} for r, c in ((0, 8), (1, 1), (2, 7), (1, 1536), (5, 17), (64, 1536), (31, 40))
    ),
)

ROPE = Contract(
    name="rope",
    formula="rotation of pairs (i, i + rotary / 2) by the position's angles, in place",
    inputs={
        "x": Tensor("float32", ("rows", "heads", "dim")),
        "cos": Tensor("float32", ("rows", "rotary")),
        "sin": Tensor("float32", ("rows", "rotary")),
    },
    output=Tensor("float32", ("rows", "heads", "dim")),
    slack=1e-6,
    reference=rope,
    magnitude=rope_magnitude,
    samples=tuple(
        {"rows": r, "heads": h, "dim": d, "rotary": n}
        for r, h, d, n in ((0, 1, 8, 8), (1, 12, 64, 64), (3, 1, 2, 2), (5, 4, 80, 32), (65, 15, 64, 64), (2, 3, 7, 6))
    ),
)

ARGMAX = Contract(
    name="argmax",
    formula="the first index of the row's largest value; of its first NaN, if it has one",
    inputs={"x": Tensor("float32", ("rows", "columns"))},
    output=Tensor("int64", ("rows",)),
    slack=0.0,
    reference=lambda x: np.argmax(x, axis=1).astype(np.float64),
    magnitude=lambda x: np.ones(len(x)),
    samples=tuple(
        {"rows": r, "columns": c} for r, c in ((0, 4), (1, 1), (2, 9), (3, 64), (5, 49152), (2, 151936), (4, 67))
    ),
)

CONTRACTS = (LINEAR, ATTENTION, RMS_NORM, GATE, ROPE, ARGMAX)
