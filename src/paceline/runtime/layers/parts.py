"""What decoders are put together from, by the names that a checkpoint gives its tensors.

A model asks for parts and never for tensors of a dtype or a device: whoever makes the parts decides how weights are
held and which kernels multiply them. `TorchParts` works everywhere; `layers.native.NativeParts` is for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime.kernels.attention import paged_attention
from paceline.runtime.layers.layer import Layer, Stack, stack
from paceline.runtime.layers.linear import Linear, LinearMap
from paceline.runtime.layers.mlp import MLP, GatedMLP, activation
from paceline.runtime.layers.norm import RMSNorm

GatedNames = tuple[str, str, str]  # gate, up and down
Embedding = Callable[[Tensor], Tensor]  # token ids [T] -> [T, hidden]


class Parts(Protocol):
    """The maker of parts. Several names given together are one map whose outputs stand side by side."""

    nbytes: int  # of all weights that the parts made so far hold
    device: torch.device

    @property
    def attention(self) -> Callable[..., Tensor]:
        """`kernels.attention.paged_attention`, or what equals it."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the type that arithmetic has."""

    def norm(self, name: str, eps: float) -> RMSNorm:
        """The norm with the weight `name`."""

    def linear(self, *names: str, bias: bool = False) -> LinearMap:
        """The map with the weights `name`.weight (and `name`.bias)."""

    def gated_mlp(self, names: GatedNames, act: str, *, bias: bool = False) -> MLP:
        """down(act(gate(x)) * up(x))."""

    def ends(self, embedding: str, head: str | None) -> tuple[Embedding, LinearMap]:
        """The embedding and the head; no name for the head: it has the embedding's weights."""

    def stack(self, layers: Sequence[Layer]) -> Stack:
        """The layers as one callable."""


class TorchParts:
    """Parts that torch computes, of one dtype on one device."""

    attention: Callable[..., Tensor] = staticmethod(paged_attention)

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype) -> None:
        self._weights = weights
        self.device = torch.device(device)
        self._dtype = dtype
        self.nbytes = 0

    def tensor(self, name: str) -> Tensor:
        """See `Parts`."""
        tensor = self._weights[name].to(device=self.device, dtype=self._dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def norm(self, name: str, eps: float) -> RMSNorm:
        """See `Parts`."""
        return RMSNorm(self.tensor(name), eps)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """See `Parts`."""
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        return Linear([self.tensor(f"{name}.weight") for name in names], biases)

    def gated_mlp(self, names: GatedNames, act: str, *, bias: bool = False) -> MLP:
        """See `Parts`."""
        gate, up, down = names
        return GatedMLP(self.linear(gate, up, bias=bias), self.linear(down, bias=bias), activation(act))

    def ends(self, embedding: str, head: str | None) -> tuple[Embedding, Linear]:
        """See `Parts`. Tied or not, the head is a matrix of its own: laid out for products, not for looking rows up."""
        table = self.tensor(f"{embedding}.weight")
        return (lambda ids: F.embedding(ids, table)), Linear(table) if head is None else self.linear(head)

    def stack(self, layers: Sequence[Layer]) -> Stack:
        """See `Parts`."""
        return stack(layers)
