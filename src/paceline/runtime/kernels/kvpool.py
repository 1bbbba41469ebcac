"""The paged memory that holds keys and values of all requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of what one layer caches for each token."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token in this layer."""
        return self.kv_heads * (self.k_dim + self.v_dim) * dtype.itemsize


class KVPool:
    """Keys and values of every layer, in blocks of `block_size` tokens that the scheduler hands out.

    `keys[layer]` is [num_blocks + 1, block_size, kv_heads, k_dim], `values[layer]` the same with v_dim. Blocks 0 to
    num_blocks - 1 belong to the scheduler. The one behind them, `scratch_block`, pads block tables: it is never
    written and stays zero, because a masked position still multiplies its value by a weight of zero, and zero times
    NaN is NaN.
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

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at `slots` [T] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in every layer: nothing of a former owner is left in slots not written yet."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros; on a CPU, pages that the kernel provides when they are first written, so that a large pool costs nothing.

    `torch.zeros` writes them all: seconds at start-up, and as long again to take them back when the process is killed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)
