"""A pre-norm layer, and the stack that layers make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.layers.attention import Attention
from paceline.runtime.layers.mlp import MLP
from paceline.runtime.layers.norm import RMSNorm

# (hidden [T, H], cos, sin [T, rotary_dim], batch, pool) -> hidden [S, H] of the S tokens whose logits are wanted. The
# first argument may be changed in place.
Stack = Callable[[Tensor, Tensor, Tensor, RaggedBatch, KVPool], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """hidden + attention(norm(hidden)), and that + mlp(norm(that))."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same, changed in place."""
        hidden += self.attention(self.attention_norm(hidden), cos, sin, batch, pool)
        hidden += self.mlp(self.mlp_norm(hidden))
        return hidden


def stack(layers: Sequence[Callable[..., Tensor]]) -> Stack:
    """One after the other."""

    def run(hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        for layer in layers:
            hidden = layer(hidden, cos, sin, batch, pool)
        return hidden[batch.logit_rows]

    return run
