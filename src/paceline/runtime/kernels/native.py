"""The native CPU kernels, where the distribution `paceline-native` is installed.

They take float32 tensors on the CPU and keep the contracts of the torch path, which stays their reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool

INSTALL = "pip install paceline-native, or ./native from a checkout"


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("paceline_native"), None
    except ModuleNotFoundError as error:
        if error.name != "paceline_native":
            return None, f"the native kernels do not load: {error}"
        return None, f"the native kernels are not installed ({INSTALL})"
    except ImportError as error:
        return None, f"the native kernels do not load: {error}"


def unavailable() -> str | None:
    """Why the kernels cannot be used here, in one line; None where they can."""
    return _load()[1]


def native() -> ModuleType:
    """The module `paceline_native`. Raises ImportError with the reason where there is none."""
    module, reason = _load()
    if module is None:
        raise ImportError(reason)
    return module


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of a map are stored.

    kind     "float32", "bfloat16", "int8" or "int4"; the last two also round activations
    group    inputs that share a scale, 32, 64 or 128: int4's weights and activations, int8's activations
    minimum  int4 weights lie between a group's lowest and highest, as in GGUF's Q4_1, instead of around zero
    """

    kind: str
    group: int | None = None
    minimum: bool = False


FLOAT32, BFLOAT16 = WeightFormat("float32"), WeightFormat("bfloat16")
INT8 = WeightFormat("int8", 64)
INT4 = WeightFormat("int4", 32, minimum=True)


def set_threads(threads: int | None, cores: Sequence[int] = ()) -> None:
    """How many threads compute (None: as many as torch has now), pinned to `cores` one by one.

    Raises ConfigError.
    """
    if cores and threads is not None and threads != len(cores):
        raise ConfigError(f"threads is {threads} and cores names {len(cores)}: give one core for each thread")
    count = threads or len(cores) or torch.get_num_threads()
    try:
        native().set_threads(count, cores=list(cores))
    except ValueError as error:
        raise ConfigError(f"cores {','.join(map(str, cores))}: {error}") from error


class NativeLinear:
    """y [T, out] = act(x [T, in] W^T + b) + residual, over weights packed once (`pack`).

    activation  "none", "silu", "gelu_tanh" or "relu". A map packed as gated computes act(gate) * up + residual
    """

    __slots__ = ("activation", "in_features", "out_features", "packed")

    def __init__(self, packed: Any, activation: str = "none") -> None:
        self.packed = packed
        self.in_features: int = packed.in_features
        self.out_features: int = packed.out_features
        self.activation = activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """A new tensor; `residual` [T, out] is left as it is."""
        out = x.new_empty(x.shape[0], self.out_features)
        self.packed(x, out, self.activation, residual)
        return out

    def rows(self, channels: Tensor) -> Tensor:
        """Rows [T, in] of the weight as the kernels see it: an embedding lookup, for a head that is tied to it."""
        out = torch.empty(len(channels), self.in_features)
        self.packed.rows(channels, out)
        return out


def pack(weight: Tensor, bias: Tensor | None = None, form: WeightFormat = FLOAT32, *, gated: bool = False) -> Any:
    """A `paceline_native.PackedLinear` of float32 [out, in]; `gated`: of [2 * out, in], gate before up."""
    return native().pack(weight, form.kind, bias=bias, gated=gated, group=form.group, minimum=form.minimum)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: KVPool,
    layer: int,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `kernels.attention.paged_attention` computes, in float32, over a pool of any type on the CPU.

    Heads of q, k, v are dense.
    """
    starts, contexts = host_tensors(batch)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    terms: dict[str, int] = {} if window is None else {"window": window}
    native().paged_attention(
        q,
        k,
        v,
        pool.keys[layer],
        pool.values[layer],
        batch.slot_mapping,
        batch.block_tables,
        starts,
        contexts,
        out,
        scale,
        softcap=softcap or 0.0,
        sinks=sinks,
        key_scales=pool.key_scales[layer],
        value_scales=pool.value_scales[layer],
        **terms,
    )
    return out


def host_tensors(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """`row_starts` and `context_lens` as tensors; made once a step."""
    found: tuple[Tensor, Tensor] | None = batch.memo.get("native")
    if found is None:
        found = batch.memo["native"] = (torch.tensor(batch.row_starts), torch.tensor(batch.context_lens))
    return found
