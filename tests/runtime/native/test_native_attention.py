"""Native paged attention equals the torch path over every way a batch can be ragged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.batch import RaggedBatch, batch_of
from paceline.runtime.kernels import attention, native
from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool, KVSpec


def ragged(
    rows: list[tuple[int, int]], block_size: int, spec: KVSpec, dtype: torch.dtype
) -> tuple[KVPool, RaggedBatch]:
    """A pool with something in every slot, and a batch of rows of (tokens cached, tokens to compute)."""
    needed = [-(-(cached + new) // block_size) for cached, new in rows]
    pool = KVPool([spec], sum(needed) + 2, block_size, dtype=dtype)
    everywhere = torch.arange(pool.num_blocks * block_size)
    k, v = (torch.randn(len(everywhere), spec.kv_heads, dim) for dim in (spec.k_dim, spec.v_dim))
    pool.write(0, everywhere, k, v)
    free = np.random.default_rng(len(rows)).permutation(pool.num_blocks).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    sequences = [[0] * (cached + new) for cached, new in rows]
    starts = [cached for cached, _ in rows]
    return pool, batch_of(sequences, starts, tables, block_size=block_size, scratch_block=pool.scratch_block)


def compare(
    rows: list[tuple[int, int]],
    *,
    spec: KVSpec,
    group: int,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    pool, batch = ragged(rows, block_size, spec, dtype)
    # As a fused projection gives them: slices of one tensor.
    heads, tokens = spec.kv_heads * group, batch.num_tokens
    wide = torch.randn(tokens, heads * spec.k_dim + spec.kv_heads * (spec.k_dim + spec.v_dim))
    parts = wide.split([heads * spec.k_dim, spec.kv_heads * spec.k_dim, spec.kv_heads * spec.v_dim], dim=1)
    q = parts[0].unflatten(1, (heads, spec.k_dim))
    k, v = (part.unflatten(1, (spec.kv_heads, -1)) for part in parts[1:])
    terms: dict[str, Any] = {"scale": 1 / math.sqrt(spec.k_dim), "window": window, "softcap": softcap, "sinks": sinks}
    found, kept = [], []
    for kernel in (native.paged_attention, attention.paged_attention):
        found.append(kernel(q, k, v, pool, 0, batch, **terms))
        parts_kept = (pool.keys[0], pool.values[0], pool.key_scales[0], pool.value_scales[0])
        kept.append([part.clone() for part in parts_kept if part is not None])
    ours, theirs = found
    if dtype == torch.bfloat16 and not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
        # A processor that multiplies bfloat16 rounds queries, exactly so, and softmax weights, by half a step at most.
        rounded = attention.paged_attention(q.bfloat16().float(), k, v, pool, 0, batch, **terms)
        torch.testing.assert_close(ours, rounded, rtol=1e-4, atol=1e-5 + 2.0**-8 * float(pool.values[0].abs().max()))
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # Both write the same bits, so requests may share blocks whichever path computed them.
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 90), st.just(1)) | st.tuples(st.integers(0, 60), st.integers(1, 40)),
        min_size=1,
        max_size=7,
    ),
    block_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    dims=st.sampled_from([(4, 8), (16, 16), (64, 64)]),
    window=st.none() | st.integers(1, 70),
    softcap=st.none() | st.sampled_from([0.5, 20.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from(list(KV_DTYPES.values())),
)
def test_equals_torch(
    rows: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    dtype: torch.dtype,
) -> None:
    compare(
        rows,
        spec=KVSpec(kv_heads, *dims),
        group=group,
        dtype=dtype,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=torch.randn(kv_heads * group) if with_sinks else None,
    )


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("rows", [[(1500, 1)], [(900, 1), (3000, 1), (0, 1)], [(530, 400), (2000, 1)], [(0, 700)]])
def test_long_contexts(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    compare(rows, spec=KVSpec(3, 64, 64), group=3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 20])
def test_what_was_not_written_is_never_read(dtype: torch.dtype, window: int | None) -> None:
    """Slots beyond a row's context may hold anything, NaN among it: blocks need no scrubbing between owners."""
    rows = [(5, 1), (16, 1), (33, 1), (0, 3), (29, 21), (0, 40)]
    spec = KVSpec(2, 64, 64)
    pool, batch = ragged(rows, 16, spec, dtype=dtype)
    q, k, v = torch.randn(batch.num_tokens, 6, 64), *torch.randn(2, batch.num_tokens, 2, 64)

    def attend() -> Tensor:
        return native.paged_attention(q, k, v, pool, 0, batch, scale=0.125, window=window)

    want = attend()
    held = set()
    for row, context in enumerate(batch.context_lens):
        held |= {int(batch.block_tables[row, i // 16]) * 16 + i % 16 for i in range(context)}
    free = torch.tensor([slot for slot in range((pool.num_blocks + 1) * 16) if slot not in held])
    for tensor in (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales):
        if tensor is not None:
            tensor.flatten(0, 1)[free] = torch.nan if tensor.is_floating_point() else 127
    assert torch.equal(attend(), want)
