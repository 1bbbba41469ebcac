"""The KV pool in each of its types: what is written is read back within half a step, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool, KVSpec, quantize

SPECS = (KVSpec(2, 8, 6), KVSpec(1, 3, 5))
# Half a step of a float type, relative to the value.
HALF_STEPS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def read(pool: KVPool, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at these slots, in float64."""
    found = []
    for kept, scales in (
        (pool.keys[layer], pool.key_scales[layer]),
        (pool.values[layer], pool.value_scales[layer]),
    ):
        rows = kept.flatten(0, 1)[slots].double()
        found.append(rows if scales is None else rows * scales.flatten(0, 1)[slots, :, None].double())
    return found[0], found[1]


def bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a pool of that type may move each value of x [T, heads, dim], which are normal numbers in it or zero."""
    if dtype != torch.int8:
        return x.abs() * HALF_STEPS[dtype]
    # Half of largest / 127; scale and product are each rounded to float32.
    return (x.abs().amax(-1, keepdim=True) * (0.5 / 127 * (1 + 2.0**-14)) + 7.5e-37).expand_as(x)


def filled(dtype: torch.dtype, blocks: int = 6, block_size: int = 4) -> KVPool:
    pool = KVPool(SPECS, blocks, block_size, dtype=dtype)
    slots = torch.arange(blocks * block_size)
    for layer, spec in enumerate(SPECS):
        shape = (len(slots), spec.kv_heads)
        pool.write(layer, slots, torch.randn(*shape, spec.k_dim), torch.randn(*shape, spec.v_dim))
    return pool


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(list(KV_DTYPES.values())),
    block_size=st.sampled_from([1, 4, 16]),
    scale=st.sampled_from([0.0, 1e-2, 1.0, 1e3]),
    slots=st.lists(st.integers(0, 5 * 16 - 1), min_size=1, max_size=20, unique=True),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read_back(
    dtype: torch.dtype, block_size: int, scale: float, slots: list[int], seed: int
) -> None:
    """Whatever the blocks; every other slot and layer stays as it was."""
    torch.manual_seed(seed)
    pool, at = filled(dtype, 80 // block_size, block_size), torch.tensor(slots)
    everything = torch.arange(80)
    before = [read(pool, layer, everything) for layer in (0, 1)]
    spec = SPECS[0]
    # Nothing near zero, where half a step of float16 is not half a step of the value.
    k, v = (
        scale * (torch.rand(len(slots), spec.kv_heads, dim) + 0.1) * torch.randn(len(slots), spec.kv_heads, dim).sign()
        for dim in (spec.k_dim, spec.v_dim)
    )
    pool.write(0, at, k, v)
    for found, given_, was in zip(read(pool, 0, everything), (k, v), before[0], strict=True):
        assert ((found[at] - given_).abs() <= bound(given_.double(), dtype)).all()
        others = torch.ones(80, dtype=torch.bool).index_fill_(0, at, value=False)
        assert torch.equal(found[others], was[others])
    for found, was in zip(read(pool, 1, everything), before[1], strict=True):
        assert torch.equal(found, was)
    scratch = torch.arange(80, 80 + block_size)
    assert not any(part.any() for layer in (0, 1) for part in read(pool, layer, scratch))


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_sizes(dtype: torch.dtype) -> None:
    """A token's bytes, scales counted, times the tokens are the pool's: the number of blocks is worked out from it."""
    pool = KVPool(SPECS, 5, 4, dtype=dtype)
    assert pool.nbytes == 6 * 4 * sum(spec.bytes_per_token(dtype) for spec in SPECS)
    assert (pool.key_scales[0] is None) == (dtype != torch.int8)


def test_a_token_takes_fewer_bytes() -> None:
    spec = KVSpec(3, 64, 64)
    found = {name: spec.bytes_per_token(dtype) for name, dtype in KV_DTYPES.items()}
    assert found == {"float32": 1536, "bfloat16": 768, "float16": 768, "int8": 384 + 24}


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_scrubbed_blocks_are_zero(dtype: torch.dtype) -> None:
    pool = filled(dtype)
    nan = torch.full((1, 2, 8), torch.nan)
    pool.write(0, torch.tensor([5]), nan, nan[..., :6])
    pool.scrub([1, 4])
    for layer in (0, 1):
        for tensor in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
            kept = tensor[layer]
            if kept is not None:
                assert not kept[[1, 4]].any()
                assert kept[[0, 2, 3, 5]].any()


def test_int8_is_symmetric_and_uses_its_range() -> None:
    numbers, scales = quantize(torch.tensor([[[-2.0, 1.0, 0.5]], [[0.0, 0.0, 0.0]], [[3e38, -3e38, 1.0]]]))
    assert numbers[:, 0].tolist() == [[-127, 64, 32], [0, 0, 0], [127, -127, 0]]
    torch.testing.assert_close(scales[:, 0], torch.tensor([2 / 127, 0, 3e38 / 127]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_head(bad: float) -> None:
    x = torch.ones(2, 2, 3)
    x[1, 0, 2] = bad
    numbers, scales = quantize(x)
    found = numbers * scales[..., None]
    assert found[1, 0].isnan().all()
    found[1, 0] = 1
    torch.testing.assert_close(found, torch.ones(2, 2, 3))
