"""Paged attention against a dense float64 one, over every way a batch can be ragged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.batch import RaggedBatch, batch_of
from paceline.runtime.kernels import attention
from paceline.runtime.kernels.attention import QUERY_TILE, paged_attention
from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool, KVSpec, quantize


@dataclass
class Case:
    """Rows of (context already cached, tokens computed now) and the shape of attention."""

    rows: list[tuple[int, int]]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    k_dim: int = 8
    v_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32  # of the pool
    seed: int = 0


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, case: Case, scale: float, sinks: Tensor | None) -> Tensor:
    """q [n, H, Dk] at positions start onward over k [S, KH, Dk], v [S, KH, Dv], in float64, one head at a time."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        first = 0 if case.window is None else max(0, start + i + 1 - case.window)
        for h in range(q.shape[1]):
            shared = h // case.group
            scores = (k[first : start + i + 1, shared] @ q[i, h]) * scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[i, h] = (weights / total) @ v[first : start + i + 1, shared]
    return out


def check(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shuffle = np.random.default_rng(case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    needed = [-(-(cached + new) // case.block_size) for cached, new in case.rows]
    specs = [KVSpec(1, 4, 4), KVSpec(case.kv_heads, case.k_dim, case.v_dim)]
    pool = KVPool(specs, sum(needed) + 3, case.block_size, dtype=case.dtype)
    # What other requests left behind must not matter, however large.
    everywhere = torch.arange(pool.num_blocks * case.block_size)
    shape = (len(everywhere), case.kv_heads)
    pool.write(1, everywhere, 1e4 * random(*shape, case.k_dim), 1e4 * random(*shape, case.v_dim))
    free = shuffle.permutation(pool.num_blocks).tolist()
    tables = [[free.pop() for _ in range(n)] for n in needed]
    contexts = [
        (random(c + n, case.kv_heads, case.k_dim), random(c + n, case.kv_heads, case.v_dim)) for c, n in case.rows
    ]
    queries = [random(n, case.kv_heads * case.group, case.k_dim) for _, n in case.rows]
    sinks = random(case.kv_heads * case.group) if case.sinks else None
    scale = 1 / math.sqrt(case.k_dim)
    for (k, v), (cached, _), table in zip(contexts, case.rows, tables, strict=True):
        slots = torch.tensor(
            [table[p // case.block_size] * case.block_size + p % case.block_size for p in range(cached)]
        )
        if cached:
            pool.write(1, slots, k[:cached], v[:cached])

    batch = batch_of(
        [[0] * (c + n) for c, n in case.rows],
        [c for c, _ in case.rows],
        tables,
        block_size=case.block_size,
        scratch_block=pool.scratch_block,
        all_logits=True,
    )
    new_k = [k[c:] for (k, _), (c, _) in zip(contexts, case.rows, strict=True)]
    new_v = [v[c:] for (_, v), (c, _) in zip(contexts, case.rows, strict=True)]
    out = paged_attention(
        pack(batch, queries),
        pack(batch, new_k),
        pack(batch, new_v),
        pool,
        1,
        batch,
        scale=scale,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
    )
    kept = [(as_kept(k, case.dtype), as_kept(v, case.dtype)) for k, v in contexts]
    want = torch.cat(
        [
            dense(q, k, v, cached, case, scale, sinks)
            for q, (k, v), (cached, _) in zip(queries, kept, case.rows, strict=True)
        ]
    )
    torch.testing.assert_close(out[batch.logit_rows].double(), want, rtol=1e-4, atol=2e-5)
    assert not pool.keys[0].any()
    assert not pool.keys[1][pool.scratch_block].any()


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a pool of that type holds of x."""
    if dtype != torch.int8:
        return x.to(dtype).float()
    numbers, scales = quantize(x)
    return numbers * scales[..., None]


def pack(batch: RaggedBatch, rows: list[Tensor]) -> Tensor:
    """Rows in the caller's order -> a tensor in the batch's. `logit_rows` of all tokens is the way back."""
    flat = torch.cat(rows)
    placed = torch.empty_like(flat)
    placed[batch.logit_rows] = flat
    return placed


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decode = st.tuples(st.integers(0, 90), st.just(1))
    chunk = st.tuples(st.integers(0, 60), st.integers(1, 40))
    return Case(
        rows=draw(st.lists(decode | chunk, min_size=1, max_size=7)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3])),
        k_dim=draw(st.sampled_from([4, 8])),
        v_dim=draw(st.sampled_from([4, 8])),
        window=draw(st.none() | st.integers(1, 70)),
        softcap=draw(st.none() | st.sampled_from([0.5, 20.0])),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(KV_DTYPES.values()))),
        seed=draw(st.integers(0, 9)),
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_equals_dense_attention(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 40, 600])
def test_long_chunks_are_tiled(window: int | None, dtype: torch.dtype) -> None:
    rows = [(0, QUERY_TILE + 70), (900, 1), (530, QUERY_TILE + 3)]
    check(Case(rows, kv_heads=1, group=1, window=window, dtype=dtype))


@pytest.mark.parametrize("window", [None, 5, 33])
def test_small_tiles_share_one_bias(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Chunks of several tiles at different places, one that starts at 0, one shorter than a tile."""
    monkeypatch.setattr(attention, "BIAS_ELEMENTS", 0)  # the smallest tiles there are
    check(Case(rows=[(3, 50), (100, 37), (0, 41), (64, 2), (9, 1)], group=2, window=window))


def test_decodes_of_very_different_context() -> None:
    """Rows far apart in length go to different groups, in an order unlike the batch's."""
    check(Case(rows=[(1200, 1), (3, 1), (1100, 1), (0, 1), (250, 1), (260, 1)], kv_heads=1, group=2))


def test_groups_that_fill_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes taken a few at a time, the last group smaller, one row too large for any group."""
    monkeypatch.setattr(attention, "GROUP_BYTES", 40 * 2 * 2 * 8 * 4)  # of 40 keys
    check(Case(rows=[(8, 1), (9, 1), (70, 1), (12, 1), (11, 1), (3, 1), (0, 1), (18, 7), (19, 1)], block_size=4))


def test_a_group_is_not_split_for_little() -> None:
    check(Case(rows=[(100, 1), (3, 1)], kv_heads=1, group=2))
    check(Case(rows=[(15, 1), (15, 1)], kv_heads=1, group=2))  # full blocks: no mask at all
