"""The paged memory that holds keys and values of all requests, in a type of its own."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What keys and values may be kept in, whatever the model computes in.
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}

_SCALE = torch.float32
# Largest value of a head below which it counts as zero: its inverse would overflow.
_TINY = 7.5e-37


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of what one layer caches for each token."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in this layer, and of their scales where dtype is int8."""
        scales = 2 * _SCALE.itemsize if dtype == torch.int8 else 0
        return self.kv_heads * ((self.k_dim + self.v_dim) * dtype.itemsize + scales)


class KVPool:
    """Keys and values of every layer, in blocks of `block_size` tokens that the scheduler hands out.

    `keys[layer]` is [num_blocks + 1, block_size, kv_heads, k_dim], `values[layer]` the same with v_dim; both of
    `dtype`. With int8, `key_scales[layer]` and `value_scales[layer]`, float32 [num_blocks + 1, block_size, kv_heads],
    are what a head of a token is multiplied with; with other types they are None.

    Blocks 0 to num_blocks - 1 belong to the scheduler. The one behind them, `scratch_block`, pads block tables: it is
    never written and stays zero, because a masked position still multiplies its value by a weight of zero, and zero
    times NaN is NaN.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.device = torch.device(device)
        self.dtype = dtype
        shape = (num_blocks + 1, block_size)
        self.keys = [_zeros((*shape, s.kv_heads, s.k_dim), self.device, dtype) for s in self.specs]
        self.values = [_zeros((*shape, s.kv_heads, s.v_dim), self.device, dtype) for s in self.specs]
        self.key_scales, self.value_scales = (
            [_zeros((*shape, s.kv_heads), self.device, _SCALE) if dtype == torch.int8 else None for s in self.specs]
            for _ in "kv"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at `slots` [T] (block * block_size + offset).

        Floats are rounded to the nearest of `dtype`; for int8 see `quantize`.
        """
        for given, kept, scales in (
            (k, self.keys[layer], self.key_scales[layer]),
            (v, self.values[layer], self.value_scales[layer]),
        ):
            if scales is None:
                rows = given.to(self.dtype)
            else:
                rows, row_scales = quantize(given)
                scales.flatten(0, 1).index_copy_(0, slots, row_scales)
            kept.flatten(0, 1).index_copy_(0, slots, rows)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in every layer: nothing of a former owner is left in slots not written yet."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in self._tensors():
            tensor.index_fill_(0, index, 0)

    def _tensors(self) -> list[Tensor]:
        scales = (tensor for tensor in (*self.key_scales, *self.value_scales) if tensor is not None)
        return [*self.keys, *self.values, *scales]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, heads, dim] as int8 [T, heads, dim] and scales float32 [T, heads]: x is about int8 * scale.

    Symmetric, the largest of a head becoming 127, so no value moves by more than half a scale, largest / 254 (rounding
    of float32 aside). A head with a value that is not finite gets NaN for its scale.
    """
    x = x.to(_SCALE)
    most = x.abs().amax(-1)
    sound = most.isfinite()  # a maximum with a NaN is NaN
    scale = torch.where(sound, most / 127, torch.nan).masked_fill_(most < _TINY, 0.0)
    # Not `127 / most`, which torch rounds twice: the native kernels' integers would differ from these now and then.
    inverse = torch.where(sound & (most >= _TINY), torch.full_like(most, 127).div_(most), 0.0)
    # 0 * infinity is NaN, which no integer stands for.
    return x.mul(inverse[..., None]).nan_to_num_(0.0).round_().to(torch.int8), scale


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros; on a CPU, pages that the kernel provides when they are first written, so that a large pool costs nothing.

    `torch.zeros` writes them all: seconds at start-up, and as long again to take them back when the process is killed.
    `numpy.zeros` asks for huge pages, and a kernel that has to move memory to make one stalls a step for milliseconds.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes:
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
