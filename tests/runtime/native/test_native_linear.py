"""Native linear maps on torch's tensors, and how their absence is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.runtime.kernels.native import BFLOAT16, FLOAT32, INT4, INT8, NativeLinear, WeightFormat, pack
from paceline.runtime.layers.linear import Linear


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_equals_the_torch_path(rows: int) -> None:
    weight, bias, x = torch.randn(96, 200), torch.randn(96), torch.randn(rows, 200)
    want = Linear(weight, [bias])(x)
    torch.testing.assert_close(NativeLinear(pack(weight, bias))(x), want, rtol=1e-4, atol=1e-4)
    residual = torch.randn(rows, 96)
    torch.testing.assert_close(NativeLinear(pack(weight, bias))(x, residual), want + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "error"), [(BFLOAT16, 0.01), (INT8, 0.02), (INT4, 0.2)])
def test_quantized_maps_are_near(form: WeightFormat, error: float) -> None:
    """The relative error of a whole row of results."""
    weight, x = torch.randn(96, 256), torch.randn(9, 256)
    want, found = x @ weight.T, NativeLinear(pack(weight, form=form))(x)
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).max() < error


def test_gate_and_up_in_one() -> None:
    gate, up, x = torch.randn(50, 64), torch.randn(50, 64), torch.randn(5, 64)
    both = NativeLinear(pack(torch.cat([gate, up]), gated=True), "silu")
    torch.testing.assert_close(both(x), F.silu(x @ gate.T) * (x @ up.T), rtol=1e-4, atol=1e-4)


def test_a_tensor_of_another_type_is_named() -> None:
    with pytest.raises(TypeError, match="x must be a float32 tensor on the CPU"):
        NativeLinear(pack(torch.randn(8, 8)))(torch.randn(2, 8, dtype=torch.float64))


def test_inference_tensors_and_slices_are_taken() -> None:
    weight = torch.randn(40, 64)
    with torch.inference_mode():
        x = torch.randn(6, 100)[:, 3:67]
        torch.testing.assert_close(NativeLinear(pack(weight))(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [FLOAT32, BFLOAT16, INT8])
def test_rows_are_those_of_the_product(form: WeightFormat) -> None:
    """A tied head serves as the embedding: a row looked up is what multiplies."""
    head = NativeLinear(pack(torch.randn(70, 48), form=form))
    looked_up = head.rows(torch.arange(70))
    torch.testing.assert_close(head(torch.eye(48)).T, looked_up, rtol=0.02 if form is INT8 else 1e-6, atol=0.02)
    torch.testing.assert_close(head.rows(torch.tensor([69, 3, 3])), looked_up[[69, 3, 3]])
