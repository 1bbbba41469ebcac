"""Every test runs on each instruction set that this processor has, alone and with helpers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("paceline_native", reason="paceline-native is not built", exc_type=ImportError)


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.threads()
    native.set_threads(request.param, spin_us=5)
    yield request.param
    native.set_threads(**before)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def floats(random: np.random.Generator, *shape: int) -> Any:
    """Normal float32."""
    return random.standard_normal(shape, dtype=np.float32)


def astray(array: Any, pad: int = 3) -> Any:
    """The same values where nothing is aligned: one element off, and rows of a length of their own."""
    wide = np.full((*array.shape[:-1], array.shape[-1] + pad), np.nan, dtype=array.dtype)
    flat = np.full(wide.size + 1, np.nan if array.dtype.kind == "f" else 0, dtype=array.dtype)
    view = flat[1:].reshape(wide.shape)[..., : array.shape[-1]]
    view[...] = array
    return view


def as_argument(numbers: Any, kind: str) -> Any:
    """What `contracts.stored` gives, as a kernel takes it: numpy has no word for bfloat16."""
    if kind != "bfloat16":
        return numbers
    torch = pytest.importorskip("torch")
    return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)


def within(found: Any, contract: Any, *args: Any, extra: Any = 0.0, **kwargs: Any) -> None:
    """Assert that a result is as close to the reference as the contract says."""
    want = contract.reference(*args, **kwargs)
    allowed = contract.slack * contract.magnitude(*args, **kwargs) + extra
    error = np.abs(found.astype(np.float64) - want)
    assert found.shape == want.shape
    assert (error <= allowed + 1e-37).all(), (
        f"{contract.name}: error {(error / (allowed + 1e-37)).max():.3g} of allowed"
    )
