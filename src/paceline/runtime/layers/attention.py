"""Grouped-query attention over the paged pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.layers.linear import LinearMap
from paceline.runtime.layers.norm import RMSNorm
from paceline.runtime.layers.rope import apply_rope


@dataclass(frozen=True, slots=True)
class Attention:
    """q, k and v are one map, with rotary positions. Called with cos and sin [T, rotary_dim]."""

    index: int  # of the layer
    heads: int
    kv_heads: int
    head_dim: int
    qkv: LinearMap
    out: LinearMap
    kernel: Callable[..., Tensor]  # as `kernels.attention.paged_attention`
    window: int | None = None  # keys a query sees, itself included
    qk_norm: RMSNorm | None = None  # of queries and keys, head by head, before rotation

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        rotating = self.heads + self.kv_heads
        qkv = self.qkv(x).unflatten(1, (rotating + self.kv_heads, self.head_dim))
        qk, v = qkv[:, :rotating], qkv[:, rotating:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = apply_rope(qk, cos, sin)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        mixed = self.kernel(q, k, v, pool, self.index, batch, scale=self.scale, window=self.window)
        return self.out(mixed.flatten(1, 2))
