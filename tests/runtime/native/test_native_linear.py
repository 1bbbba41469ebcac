"""Native linear maps on torch's tensors, and how their absence is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.runtime.kernels.native import NativeLinear
from paceline.runtime.layers.linear import Linear


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_equals_the_torch_path(rows: int) -> None:
    weight, bias, x = torch.randn(96, 200), torch.randn(96), torch.randn(rows, 200)
    want = Linear(weight, [bias])(x)
    torch.testing.assert_close(NativeLinear(weight, bias)(x), want, rtol=1e-4, atol=1e-4)
    residual = torch.randn(rows, 96)
    torch.testing.assert_close(NativeLinear(weight, bias)(x, residual), want + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 0.01), ("int8", 0.02), ("int4", 0.2)])
def test_quantized_maps_are_near(kind: str, error: float) -> None:
    """The relative error of a whole row of results."""
    weight, x = torch.randn(96, 256), torch.randn(9, 256)
    want, found = x @ weight.T, NativeLinear(weight, kind=kind)(x)
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).max() < error


def test_gate_and_up_in_one() -> None:
    gate, up, x = torch.randn(50, 64), torch.randn(50, 64), torch.randn(5, 64)
    both = NativeLinear(torch.cat([gate, up]), gated=True, activation="silu")
    torch.testing.assert_close(both(x), F.silu(x @ gate.T) * (x @ up.T), rtol=1e-4, atol=1e-4)


def test_a_tensor_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match="x must be a float32 tensor on the CPU"):
        NativeLinear(torch.randn(8, 8))(torch.randn(2, 8, dtype=torch.float64))


def test_inference_tensors_and_slices_are_taken() -> None:
    weight = torch.randn(40, 64)
    with torch.inference_mode():
        x = torch.randn(6, 100)[:, 3:67]
        torch.testing.assert_close(NativeLinear(weight)(x), x @ weight.T, rtol=1e-4, atol=1e-4)
