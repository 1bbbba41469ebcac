"""Attention over paged keys and values against a dense float64 one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import paceline_native as native
import pytest
from conftest import astray, floats
from paceline_native.contracts import ATTENTION, ATTENTION_CASES, AttentionCase, attention, attention_magnitude


class Problem:
    """Arguments of one call, and what it should give."""

    def __init__(self, case: AttentionCase, random: np.random.Generator, scale: float = 1.0) -> None:
        self.case = case
        heads = case.kv_heads * case.group
        needed = [-(-(cached + new) // case.block_size) for cached, new in case.rows]
        blocks = sum(needed) + 3
        # What others left in the pool must not matter, however large.
        shape = (blocks, case.block_size, case.kv_heads)
        self.keys = 1e4 * floats(random, *shape, case.k_dim)
        self.values = 1e4 * floats(random, *shape, case.v_dim)
        free = random.permutation(blocks - 1).tolist()
        self.tables = np.full((len(needed), max(needed)), blocks - 1, dtype=np.int64)
        for row, count in enumerate(needed):
            self.tables[row, :count] = [free.pop() for _ in range(count)]
        counts = [new for _, new in case.rows]
        self.row_starts = np.cumsum([0, *counts], dtype=np.int64)
        self.context_lens = np.array([cached + new for cached, new in case.rows], dtype=np.int64)
        self.contexts = [
            (scale * floats(random, n, case.kv_heads, case.k_dim), floats(random, n, case.kv_heads, case.v_dim))
            for n in self.context_lens
        ]
        self.q = floats(random, sum(counts), heads, case.k_dim)
        self.sinks = floats(random, heads) if case.sinks else None
        self.scale = 1 / math.sqrt(case.k_dim)
        self.slots = np.concatenate([self._slots(r, c, c + n) for r, (c, n) in enumerate(case.rows)])
        for r, (cached, _) in enumerate(case.rows):
            for pool, source in zip((self.keys, self.values), self.contexts[r], strict=True):
                pool.reshape(-1, *pool.shape[2:])[self._slots(r, 0, cached)] = source[:cached]
        self.k, self.v = (
            np.concatenate([context[i][c:] for context, (c, _) in zip(self.contexts, case.rows, strict=True)])
            for i in (0, 1)
        )

    def _slots(self, row: int, low: int, high: int) -> Any:
        size = self.case.block_size
        return np.array([self.tables[row, p // size] * size + p % size for p in range(low, high)], dtype=np.int64)

    def run(self, **changed: Any) -> Any:
        out = changed.pop("out", None)
        if out is None:
            out = np.full((*self.q.shape[:2], self.case.v_dim), np.nan, dtype=np.float32)
        names = ("q", "k", "v", "keys", "values", "slots", "tables", "row_starts", "context_lens")
        arguments = {name: changed.pop(name, getattr(self, name)) for name in names}
        terms: dict[str, Any] = {"scale": self.scale, "sinks": self.sinks}
        if self.case.window is not None:
            terms["window"] = self.case.window
        if self.case.softcap is not None:
            terms["softcap"] = self.case.softcap
        native.paged_attention(**arguments, out=out, **{**terms, **changed})
        return out

    def want(self) -> tuple[Any, Any]:
        """The reference, and how far a result may be from it."""
        found, allowed = [], []
        terms: dict[str, Any] = {"window": self.case.window, "softcap": self.case.softcap, "sinks": self.sinks}
        for r, (k, v) in enumerate(self.contexts):
            q = self.q[self.row_starts[r] : self.row_starts[r + 1]]
            found.append(attention(q, k, v, self.case.rows[r][0], scale=self.scale, **terms))
            allowed.append(ATTENTION.slack * attention_magnitude(q, k, v, 0, scale=self.scale))
        return np.concatenate(found), np.concatenate(allowed)

    def check(self, found: Any) -> None:
        want, allowed = self.want()
        error = np.abs(found - want)
        assert (error <= allowed).all(), f"error {(error / allowed).max():.3g} of allowed"


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_contract(isa: str, threads: int, random: np.random.Generator, case: AttentionCase) -> None:
    problem = Problem(case, random)
    problem.check(problem.run())
    for pool, index in ((problem.keys, 0), (problem.values, 1)):
        for r, context in enumerate(problem.contexts):
            slots = problem._slots(r, 0, len(context[index]))
            np.testing.assert_array_equal(pool.reshape(-1, *pool.shape[2:])[slots], context[index])


def test_no_rows(isa: str, random: np.random.Generator) -> None:
    problem = Problem(ATTENTION_CASES[0], random)
    nothing = {name: getattr(problem, name)[:0] for name in ("q", "k", "v", "slots", "tables", "context_lens")}
    out = problem.run(**nothing, row_starts=np.zeros(1, dtype=np.int64), out=np.empty((0, 6, 64), dtype=np.float32))
    assert out.shape == (0, 6, 64)


@pytest.mark.parametrize("case", ATTENTION_CASES[:6], ids=str)
def test_tokens_may_lie_anywhere(isa: str, random: np.random.Generator, case: AttentionCase) -> None:
    """q, k and v are slices of one wider tensor, as a fused projection gives them."""
    problem = Problem(case, random)
    tokens = len(problem.q)
    together = np.concatenate([a.reshape(tokens, -1) for a in (problem.q, problem.k, problem.v)], axis=1)
    moved = astray(together)
    edges = np.cumsum([0] + [a[0].size for a in (problem.q, problem.k, problem.v)])

    def part(i: int, like: Any) -> Any:
        step = moved.strides
        inner = (like.shape[2] * 4, 4)
        return np.lib.stride_tricks.as_strided(moved[:, edges[i] :], like.shape, (step[0], *inner))

    parts = {name: part(i, getattr(problem, name)) for i, name in enumerate(("q", "k", "v"))}
    problem.check(problem.run(**parts))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 30.0, 1e4])
def test_extreme_scores(isa: str, random: np.random.Generator, scale: float) -> None:
    case = AttentionCase(((90, 1), (0, 20), (5, 30)))
    problem = Problem(case, random, scale)
    found = problem.run()
    assert np.isfinite(found).all()
    problem.check(found)


def test_nan_stays_in_its_row(isa: str, random: np.random.Generator) -> None:
    problem = Problem(AttentionCase(((90, 1), (10, 20), (5, 1))), random)
    want = problem.run()
    problem.k[5, 1, 3] = np.nan  # a token of the second row
    found = problem.run()
    hit = slice(int(problem.row_starts[1]), int(problem.row_starts[2]))
    assert np.isnan(found[hit, 3:]).any()
    np.testing.assert_array_equal(
        np.delete(found, range(hit.start, hit.stop), 0), np.delete(want, range(hit.start, hit.stop), 0)
    )


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_threads_do_not_change_short_rows(isa: str, random: np.random.Generator, case: AttentionCase) -> None:
    """A context that is not split gives the same bits whatever the number of threads."""
    short = replace(case, rows=tuple((min(c, 100), n) for c, n in case.rows))
    problem = Problem(short, random)
    before = native.threads()
    found = []
    for count in (1, 2, 4):
        native.set_threads(count, spin_us=0)
        found.append(problem.run())
    native.set_threads(**before)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_bad_batches_are_refused(random: np.random.Generator) -> None:
    problem = Problem(AttentionCase(((20, 1), (3, 4))), random)
    with pytest.raises(ValueError, match="row 0 names block 99"):
        problem.run(tables=np.full_like(problem.tables, 99))
    with pytest.raises(ValueError, match="slot -1"):
        problem.run(slots=np.full_like(problem.slots, -1))
    with pytest.raises(ValueError, match="row 1 has 4 tokens, a context of 3"):
        problem.run(context_lens=np.array([21, 3], dtype=np.int64))
    with pytest.raises(ValueError, match="row_starts"):
        problem.run(row_starts=np.array([0, 1, 6], dtype=np.int64))
    with pytest.raises(ValueError, match="window"):
        problem.run(window=0)
    with pytest.raises(ValueError, match="k has 1 along dimension 1; 2"):
        problem.run(k=problem.k[:, :1])
