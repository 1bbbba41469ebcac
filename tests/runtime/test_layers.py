"""Layers against the plain formula, in every dtype that takes a path of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.runtime.layers.linear import Linear
from paceline.runtime.layers.mlp import GatedMLP, MixtureOfExperts, activation
from paceline.runtime.layers.norm import RMSNorm

# float64 is never laid out for oneDNN: it takes the way of every other device.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def close(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 40])
def test_linear(dtype: torch.dtype, rows: int) -> None:
    """Several weights are one map; an input that is a view of something wider is as good."""
    weights = [torch.randn(n, 24, dtype=dtype) / 5 for n in (10, 6, 1)]
    biases = [torch.randn(n, dtype=dtype) for n in (10, 6, 1)]
    x = torch.randn(rows, 50, dtype=dtype)[:, 13:37]
    wanted = x.double() @ torch.cat(weights).double().T
    with torch.inference_mode():
        close(Linear(weights)(x), wanted, dtype)
        close(Linear(weights, biases)(x), wanted + torch.cat(biases).double(), dtype)
        close(Linear(weights[0])(x), wanted[:, :10], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x = 3 * torch.randn(5, 4, 16, dtype=dtype)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    flat, heads = torch.randn(16, dtype=dtype), torch.randn(4, 16, dtype=dtype)
    close(RMSNorm(flat, 1e-6)(x), wanted * flat.double(), dtype)
    close(RMSNorm(heads, 1e-6)(x), wanted * heads.double(), dtype)


def test_activation_names() -> None:
    x = torch.randn(9)
    assert torch.equal(activation("silu")(x), F.silu(x))
    with pytest.raises(UnsupportedModel, match="'cubic'"):
        activation("cubic")


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_mixture_of_experts(renormalize: bool, rows: int) -> None:
    """Against one token at a time; with more experts than tokens, some experts get none."""
    gates = [torch.randn(12, 8) for _ in range(6)]
    downs = [torch.randn(8, 6) for _ in range(6)]
    router = torch.randn(6, 8)
    experts = [GatedMLP(Linear(g), Linear(d), F.silu) for g, d in zip(gates, downs, strict=True)]
    x = torch.randn(rows, 8)
    wanted = torch.zeros(rows, 8)
    for t in range(rows):
        weights = (router @ x[t]).softmax(0)
        best = weights.topk(2)
        total = best.values.sum() if renormalize else torch.ones(())
        for weight, e in zip(best.values, best.indices.tolist(), strict=True):
            gate, up = (gates[e] @ x[t]).chunk(2)
            wanted[t] += weight / total * (downs[e] @ (F.silu(gate) * up))
    with torch.inference_mode():
        ours = MixtureOfExperts(Linear(router), experts, 2, renormalize=renormalize)(x)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
