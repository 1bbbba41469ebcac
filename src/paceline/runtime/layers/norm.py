"""Root-mean-square normalization."""

from __future__ import annotations

from torch import Tensor


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32 whatever the dtype of x.

    `weight` is [n], or [heads, n] where each head of x [T, heads, n] has its own.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)
