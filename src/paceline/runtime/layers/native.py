"""Parts that the native kernels compute: weights packed once, and as many layers as possible in one call.

Arithmetic is float32 (int8 inside quantized products), whatever the weights are stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.formats.packed import PackedFile, PackedWriter
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.kernels.native import (
    FLOAT32,
    INT4,
    INT8,
    NativeLinear,
    WeightFormat,
    host_tensors,
    native,
    pack,
    paged_attention,
)
from paceline.runtime.layers.layer import Layer, Stack, stack
from paceline.runtime.layers.linear import LinearMap
from paceline.runtime.layers.mlp import MLP, GatedMLP, activation
from paceline.runtime.layers.norm import RMSNorm
from paceline.runtime.layers.parts import Embedding, GatedNames

# Activations that a gated map can apply by itself; with another, torch does.
_FUSED = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a model's weights: of its layers, and of embedding and head, which suffer more from few bits."""

    layers: WeightFormat
    head: WeightFormat


# By the value of the setting `quantization`.
QUANTIZATIONS: dict[str, Quantization] = {
    "int8": Quantization(INT8, INT8),
    "int4": Quantization(INT4, INT8),
    "int4-g64": Quantization(WeightFormat("int4", 64, minimum=True), INT8),
    "int4-g128": Quantization(WeightFormat("int4", 128, minimum=True), INT8),
}


@dataclass(frozen=True, slots=True)
class NativeMLP:
    """down(act(gate(x)) * up(x)); gate, up and activation are one kernel."""

    gate_up: NativeLinear
    down: NativeLinear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class NativeNorm(RMSNorm):
    """For few rows, torch takes nearly as long as a whole layer."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        native().rms_norm(x, self.weight, self.eps, out)
        return out


class WeightStore:
    """What parts are made from, by name: mapped from the file of an earlier start, or made and left for the next.

    No path keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else PackedFile.open(path)
        self._writer = None if path is None or self._file is not None else PackedWriter(path)

    def packed(self, name: str, make: Callable[[], Any]) -> Any:
        """A `paceline_native.PackedLinear`."""
        if self._file is not None and name in self._file.weights:
            return native().restore(*self._file.weights[name])
        made = make()
        if self._writer is not None:
            self._writer.add(name, made.description, made.buffer())
        return made

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is used as it is."""
        if self._file is not None and name in self._file.tensors:
            return self._file.tensors[name]
        made = make()
        if self._writer is not None:
            self._writer.add_tensor(name, made)
        return made

    def keep(self) -> None:
        """The model is made: leave the file for the next start."""
        if self._writer is not None:
            self._writer.commit()

    def close(self) -> None:
        """Discard what was not kept."""
        if self._writer is not None:
            self._writer.discard()


class NativeParts:
    """Implements `layers.parts.Parts`, from weights in float32 that are read only where the store has nothing."""

    attention: Callable[..., Tensor] = staticmethod(paged_attention)

    def __init__(self, weights: Mapping[str, Tensor], quantization: Quantization, store: WeightStore) -> None:
        self.nbytes = 0
        self._store = store
        self.device = torch.device("cpu")
        self._weights = weights
        self._quantization = quantization

    def tensor(self, name: str) -> Tensor:
        """See `Parts`."""
        tensor = self._store.tensor(name, lambda: self._weights[name].float())
        self.nbytes += tensor.nbytes
        return tensor

    def norm(self, name: str, eps: float) -> RMSNorm:
        """See `Parts`."""
        return NativeNorm(self.tensor(name), eps)

    def linear(self, *names: str, bias: bool = False) -> NativeLinear:
        """See `Parts`."""
        return NativeLinear(self._packed(names, self._quantization.layers, bias=bias))

    def gated_mlp(self, names: GatedNames, act: str, *, bias: bool = False) -> MLP:
        """See `Parts`."""
        gate, up, down = names
        if act not in _FUSED:
            return GatedMLP(self.linear(gate, up, bias=bias), self.linear(down, bias=bias), activation(act))
        both = self._packed((gate, up), self._quantization.layers, bias=bias, gated=True)
        return NativeMLP(NativeLinear(both, _FUSED[act]), self.linear(down, bias=bias))

    def ends(self, embedding: str, head: str | None) -> tuple[Embedding, LinearMap]:
        """See `Parts`. A head that is tied is the only copy: rows are looked up in it."""
        form = self._quantization.head
        if head is None:
            tied = NativeLinear(self._packed((embedding,), form))
            return tied.rows, tied
        dtype = torch.float32 if form == FLOAT32 else torch.bfloat16
        table = self._store.tensor(embedding, lambda: self._weights[f"{embedding}.weight"].to(dtype))
        self.nbytes += table.nbytes
        return (lambda ids: F.embedding(ids, table).float()), NativeLinear(self._packed((head,), form))

    def stack(self, layers: Sequence[Layer]) -> Stack:
        """See `Parts`. Neighbours that a native call can take whole become one call."""
        runs: list[Any] = []
        for whole, group in groupby(layers, key=lambda layer: isinstance(layer.mlp, NativeMLP)):
            members = list(group)
            runs += [NativeLayers(members)] if whole else members
        return runs[0].wanted if len(runs) == 1 else stack(runs)

    def _packed(self, names: Sequence[str], form: WeightFormat, *, bias: bool = False, gated: bool = False) -> Any:
        def make() -> Any:
            weight = _side_by_side([self._weights[f"{name}.weight"] for name in names])
            biases = _side_by_side([self._weights[f"{name}.bias"] for name in names]) if bias else None
            return pack(weight, biases, form, gated=gated)

        packed = self._store.packed(" + ".join(names), make)
        self.nbytes += packed.nbytes
        return packed


class NativeLayers:
    """Consecutive layers, in one call that Python does not take part in."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._first = layers[0].attention.index
        self._layers = [_native_layer(layer) for layer in layers]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same, changed in place."""
        self._run(hidden, cos, sin, batch, pool)
        return hidden

    def wanted(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """A `Stack`: behind its attention, the last layer computes nothing but the tokens whose logits are wanted."""
        out = hidden.new_empty(len(batch.logit_rows), hidden.shape[1])
        self._run(hidden, cos, sin, batch, pool, wanted=batch.logit_rows, out=out)
        return out

    def _run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool, **selected: Tensor
    ) -> None:
        here = slice(self._first, self._first + len(self._layers))
        native().run_layers(
            self._layers,
            hidden,
            cos,
            sin,
            pool.keys[here],
            pool.values[here],
            batch.slot_mapping,
            batch.block_tables,
            *host_tensors(batch),
            key_scales=pool.key_scales[here],
            value_scales=pool.value_scales[here],
            **selected,
        )


def _native_layer(layer: Layer) -> Any:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, NativeMLP)
    assert isinstance(attention.qkv, NativeLinear)
    assert isinstance(attention.out, NativeLinear)
    norm = attention.qk_norm
    return native().DecoderLayer(
        layer.attention_norm.weight,
        attention.qkv.packed,
        attention.out.packed,
        layer.mlp_norm.weight,
        mlp.gate_up.packed,
        mlp.down.packed,
        eps=layer.attention_norm.eps,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        activation=mlp.gate_up.activation,
        qk_norm=None if norm is None else norm.heads,
        qk_eps=None if norm is None else norm.eps,
    )


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    return tensors[0].float() if len(tensors) == 1 else torch.cat([tensor.float() for tensor in tensors])
