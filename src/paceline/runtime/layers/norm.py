"""Root-mean-square normalization."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 whatever the dtype of x.

    `weight` is [n], or [heads, n] where each head of x [T, heads, n] has its own.
    """

    __slots__ = ("eps", "heads", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.shape = weight.shape[-1:]
        self.heads = weight if weight.dim() > 1 else None
        self.weight = None if weight.dim() > 1 else weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(x, self.shape, self.weight, self.eps)
        return normal if self.heads is None else normal * self.heads
