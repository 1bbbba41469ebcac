from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

# What a kernel takes: a CPU tensor of any library that speaks DLPack, or a numpy array. Never copied.
Buffer = Any

SANITIZED: bool

class Description(TypedDict):
    kind: str  # "float32", "bfloat16", "int8" or "int4"
    isa: str
    in_features: int
    outputs: int
    gated: bool
    has_bias: bool
    group: int
    has_minimum: bool

class ThreadSettings(TypedDict):
    threads: int
    spin_us: int
    cores: list[int]

class PackedLinear:
    """A linear map with weights laid out for this processor: act(x W^T + b) + r, or act(gate) * up + r."""

    def __call__(self, x: Buffer, out: Buffer, activation: str = "none", residual: Buffer | None = None) -> None: ...
    def unpack(self, out: Buffer) -> None:
        """Write the weights as the kernels see them, float32 [channels, in_features], to `out`."""
    def rows(self, ids: Buffer, out: Buffer) -> None:
        """Write rows `ids` (int64 [n]) of the weight, as `unpack` gives it, to `out`, float32 [n, in_features].

        The lookup of an embedding that is kept as a head alone. Raises ValueError for a gated map and for rows that it
        does not have.
        """
    def buffer(self) -> NDArray[np.uint8]:
        """The packed bytes themselves, to be kept in a file; `restore` makes a map of them again."""
    @property
    def description(self) -> Description: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

class DecoderLayer:
    """A pre-norm layer: rotary grouped-query attention over paged keys and values, and a gated MLP.

    qkv gives the queries of all heads, then keys, then values; gate_up is packed with gated=True. `qk_norm` float32
    [heads + kv_heads, head_dim] normalizes queries and keys head by head before rotation, with `qk_eps` (default:
    `eps`). `window` is how many positions a query sees, its own included. Norms are copied, maps shared.
    """

    def __init__(
        self,
        attention_norm: Buffer,
        qkv: PackedLinear,
        out: PackedLinear,
        mlp_norm: Buffer,
        gate_up: PackedLinear,
        down: PackedLinear,
        *,
        eps: float,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        activation: str = "silu",
        qk_norm: Buffer | None = None,
        qk_eps: float | None = None,
    ) -> None: ...

def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def available_cores() -> int: ...
def set_threads(threads: int, spin_us: int = 50, cores: list[int] = []) -> None: ...
def threads() -> ThreadSettings: ...
def pack(
    weight: Buffer,
    kind: str,
    bias: Buffer | None = None,
    gated: bool = False,
    group: int | None = None,
    minimum: bool = False,
) -> PackedLinear:
    """Of float32 [channels, inputs]. `group` inputs share a scale: int4's weights and activations (32, 64, 128; default
    32), int8's activations (the same, or 0 for all of a row; default 64). `minimum`: int4 with 16 levels from a
    group's lowest weight to its highest, instead of around zero."""

def pack_int8(
    weight: Buffer, scale: Buffer, group: int = 64, bias: Buffer | None = None, gated: bool = False
) -> PackedLinear: ...
def pack_int4(
    weight: Buffer,
    scale: Buffer,
    minimum: Buffer | None = None,
    group: int = 32,
    bias: Buffer | None = None,
    gated: bool = False,
) -> PackedLinear: ...
def restore(description: Description, data: Buffer) -> PackedLinear: ...
def paged_attention(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    keys: Buffer,
    values: Buffer,
    slots: Buffer,
    tables: Buffer,
    row_starts: Buffer,
    context_lens: Buffer,
    out: Buffer,
    scale: float,
    window: int = ...,
    softcap: float = 0.0,
    sinks: Buffer | None = None,
    key_scales: Buffer | None = None,
    value_scales: Buffer | None = None,
) -> None:
    """`keys` and `values` are float32, bfloat16, float16 or int8; of int8 there are scales for each token and head."""

def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Buffer,
    cos: Buffer,
    sin: Buffer,
    keys: Sequence[Buffer],
    values: Sequence[Buffer],
    slots: Buffer,
    tables: Buffer,
    row_starts: Buffer,
    context_lens: Buffer,
    wanted: Buffer | None = None,
    out: Buffer | None = None,
    key_scales: Sequence[Buffer | None] | None = None,
    value_scales: Sequence[Buffer | None] | None = None,
) -> None:
    """All layers of a step, `hidden` [tokens, hidden] changed in place. `keys` and `values` hold a pool for each layer,
    and so do the scales of int8 ones; see `paged_attention`.

    With `wanted` (int64 [n], tokens) and `out` [n, hidden], what the last layer does after attention is done for these
    tokens alone, and goes to `out`; `hidden` then stays what the last layer was given.
    """

def rms_norm(x: Buffer, weight: Buffer, eps: float, out: Buffer, residual: Buffer | None = None) -> None: ...
def gate(x: Buffer, out: Buffer, activation: str = "silu") -> None: ...
def rope(x: Buffer, cos: Buffer, sin: Buffer) -> None: ...
def argmax(x: Buffer, out: Buffer) -> None: ...
def sample(
    logits: Buffer,
    temperature: Buffer,
    top_k: Buffer,
    top_p: Buffer,
    min_p: Buffer,
    uniform: Buffer,
    tokens: Buffer,
    near: Buffer,
) -> None:
    """The next token of each row of float32 [rows, vocab] into `tokens`, int64 [rows]; -1 where a row holds NaN or
    +infinity, or -infinity alone. `near`, uint8 [rows]: 1 where noise in the logits might have turned the draw. The
    parameters are float64 [rows], top_k int64; see `contracts_sample`."""
