"""Gated feed-forward blocks, dense and as a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.runtime.layers.linear import LinearMap

MLP = Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]
Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# By the name in config.json's "hidden_act".
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Activation:
    """The activation of that name. Raises UnsupportedModel."""
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} has no native implementation (known: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up as one map."""

    __slots__ = ("act", "down", "gate_up", "width")

    def __init__(self, gate_up: LinearMap, down: LinearMap, act: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.act = act
        self.width = gate_up.out_features // 2

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        return self.down(self.act(both[:, : self.width]).mul_(both[:, self.width :]))


class MixtureOfExperts:
    """Each token goes through its `top_k` best experts, weighted by the router's softmax.

    The softmax runs over all experts in float32; with `renormalize` the chosen weights are scaled to sum to one.
    """

    __slots__ = ("experts", "renormalize", "router", "top_k")

    def __init__(self, router: LinearMap, experts: Sequence[MLP], top_k: int, *, renormalize: bool) -> None:
        self.router = router
        self.experts = tuple(experts)
        self.top_k = top_k
        self.renormalize = renormalize

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.top_k, dim=-1)  # [T, top_k]
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # Sort the T * top_k assignments by expert, so that each expert's tokens lie together.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.top_k
        scale = weights.to(x.dtype).flatten()[order, None]
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        routed = x[tokens]
        parts = [expert(part) for expert, part in zip(self.experts, routed.split(counts), strict=True) if len(part)]
        return torch.zeros_like(x).index_add_(0, tokens, torch.cat(parts) * scale)
