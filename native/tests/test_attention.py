"""Attention over paged keys and values against a dense float64 one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import paceline_native as native
import pytest
from paceline_native.contracts import (
    ATTENTION,
    ATTENTION_CASES,
    CACHE_KINDS,
    AttentionCase,
    attention,
    attention_magnitude,
    attention_rounding_bound,
    in_bfloat16,
    loaded,
    stored,
    storing_bound,
    weight_rounding_bound,
)

from conftest import as_argument, astray, floats


class Problem:
    """Arguments of one call, and what it should give."""

    def __init__(
        self, case: AttentionCase, random: np.random.Generator, scale: float = 1.0, kind: str = "float32"
    ) -> None:
        self.case, self.kind = case, kind
        heads = case.kv_heads * case.group
        needed = [-(-(cached + new) // case.block_size) for cached, new in case.rows]
        blocks = sum(needed) + 3
        # What others left in the pool must not matter, however large.
        shape = (blocks, case.block_size, case.kv_heads)
        self.keys, self.key_scales = stored(1e4 * floats(random, *shape, case.k_dim), kind)
        self.values, self.value_scales = stored(1e4 * floats(random, *shape, case.v_dim), kind)
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
            slots = self._slots(r, 0, cached)
            for (pool, scales), source in zip(self._pools(), self.contexts[r], strict=True):
                numbers, their_scales = stored(source[:cached], kind)
                pool.reshape(-1, *pool.shape[2:])[slots] = numbers
                if scales is not None:
                    scales.reshape(-1, case.kv_heads)[slots] = their_scales
        self.k, self.v = (
            np.concatenate([context[i][c:] for context, (c, _) in zip(self.contexts, case.rows, strict=True)])
            for i in (0, 1)
        )

    def _slots(self, row: int, low: int, high: int) -> Any:
        size = self.case.block_size
        return np.array([self.tables[row, p // size] * size + p % size for p in range(low, high)], dtype=np.int64)

    def _pools(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        return (self.keys, self.key_scales), (self.values, self.value_scales)

    def held(self, row: int) -> tuple[Any, Any]:
        """Keys and values of a row's context as the pool has them now."""
        slots = self._slots(row, 0, int(self.context_lens[row]))
        k, v = (
            loaded(
                pool.reshape(-1, *pool.shape[2:])[slots],
                None if scales is None else scales.reshape(-1, self.case.kv_heads)[slots],
            )
            for pool, scales in self._pools()
        )
        return k, v

    def run(self, **changed: Any) -> Any:
        out = changed.pop("out", None)
        if out is None:
            out = np.full((*self.q.shape[:2], self.case.v_dim), np.nan, dtype=np.float32)
        names = ("q", "k", "v", "keys", "values", "slots", "tables", "row_starts", "context_lens")
        arguments = {name: changed.pop(name, getattr(self, name)) for name in names}
        for name in ("keys", "values"):
            arguments[name] = as_argument(arguments[name], self.kind)
        terms: dict[str, Any] = {"scale": self.scale, "sinks": self.sinks}
        terms |= {"key_scales": self.key_scales, "value_scales": self.value_scales}
        if self.case.window is not None:
            terms["window"] = self.case.window
        if self.case.softcap is not None:
            terms["softcap"] = self.case.softcap
        native.paged_attention(**arguments, out=out, **{**terms, **changed})
        return out

    def want(self, *, pairs: bool = False) -> tuple[Any, Any]:
        """The reference over what a pool keeps of keys and values, and how far a result may be from it.

        `pairs`: products are of bfloat16.
        """
        found, allowed = [], []
        for r, context in enumerate(self.contexts):
            k, v = (loaded(*stored(x, self.kind)) for x in context)
            q = self.q[self.row_starts[r] : self.row_starts[r + 1]]
            found.append(self._attention(r, k, v, in_bfloat16(q) if pairs else q))
            bound = ATTENTION.slack * attention_magnitude(q, k, v, 0, scale=self.scale)
            allowed.append(bound + weight_rounding_bound(v) if pairs else bound)
        return np.concatenate(found), np.concatenate(allowed)

    def _attention(self, row: int, k: Any, v: Any, q: Any) -> Any:
        case = self.case
        terms: dict[str, Any] = {"window": case.window, "softcap": case.softcap, "sinks": self.sinks}
        return attention(q, k, v, case.rows[row][0], scale=self.scale, **terms)

    def exact(self) -> tuple[Any, Any]:
        """The reference over keys and values as they were, and how far rounding may have moved a result from it."""
        found, allowed = [], []
        for r, (k, v) in enumerate(self.contexts):
            q = self.q[self.row_starts[r] : self.row_starts[r + 1]]
            found.append(self._attention(r, k, v, q))
            allowed.append(attention_rounding_bound(q, k, v, self.kind, scale=self.scale))
        return np.concatenate(found), np.concatenate(allowed)

    def check(self, found: Any) -> None:
        ratios = []  # of the error to what is allowed, for each way in which the kernel may have multiplied
        for pairs in (False, True)[: 2 if self.kind == "bfloat16" else 1]:
            want, allowed = self.want(pairs=pairs)
            ratios.append((np.abs(found - want) / allowed).max())
        assert min(ratios) <= 1, f"error {min(ratios):.3g} of allowed"


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_contract(isa: str, threads: int, random: np.random.Generator, case: AttentionCase, kind: str) -> None:
    problem = Problem(case, random, kind=kind)
    found = problem.run()
    problem.check(found)
    for r, context in enumerate(problem.contexts):
        for held, given in zip(problem.held(r), context, strict=True):
            np.testing.assert_array_equal(held, loaded(*stored(given, kind)))


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_rounding_moves_little(isa: str, random: np.random.Generator, case: AttentionCase, kind: str) -> None:
    """Near attention over keys and values that no pool has rounded."""
    problem = Problem(case, random, kind=kind)
    found = problem.run()
    (want, moved), (_, allowed) = problem.exact(), problem.want()
    assert (np.abs(found - want) <= moved + allowed).all()


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-2, 1.0, 3e4])
def test_what_is_written_is_read_back(isa: str, random: np.random.Generator, kind: str, size: float) -> None:
    """Within half a step, in scattered blocks; slots that nobody wrote to stay as they are."""
    problem = Problem(AttentionCase(((0, 21), (30, 1), (5, 9)), block_size=4, k_dim=19, v_dim=7), random, kind=kind)
    for x in (problem.k, problem.v):  # nothing near zero, where float16 runs out of exponents
        x[...] = size * np.sign(x) * (0.5 + np.abs(x) / 20)
    pools = [(pool.copy(), None if scales is None else scales.copy()) for pool, scales in problem._pools()]
    problem.run()
    for (now, scales), (before, scales_before), given in zip(
        problem._pools(), pools, (problem.k, problem.v), strict=True
    ):
        after, was = loaded(now, scales).reshape(-1, *now.shape[2:]), loaded(before, scales_before)
        assert (np.abs(after[problem.slots] - given) <= storing_bound(given, kind)).all()
        others = np.setdiff1d(np.arange(len(after)), problem.slots)
        np.testing.assert_array_equal(after[others], was.reshape(after.shape)[others])


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


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 30.0, 1e4])
def test_extreme_scores(isa: str, random: np.random.Generator, scale: float, kind: str) -> None:
    case = AttentionCase(((90, 1), (0, 20), (5, 30)))
    problem = Problem(case, random, scale, kind)
    found = problem.run()
    assert np.isfinite(found).all()
    problem.check(found)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_nan_stays_in_its_row(isa: str, random: np.random.Generator, kind: str, which: str, bad: float) -> None:
    problem = Problem(AttentionCase(((90, 1), (10, 20), (5, 1))), random, kind=kind)
    want = problem.run()
    getattr(problem, which)[5, 1, 3] = bad  # a token of the second row
    found = problem.run()
    hit = slice(int(problem.row_starts[1]), int(problem.row_starts[2]))
    assert not np.isfinite(found[hit, 3:]).all()
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
    with pytest.raises(TypeError, match="keys must be a float32, bfloat16, float16 or int8 tensor on the CPU with 4"):
        problem.run(keys=problem.keys.astype(np.float64))
    with pytest.raises(TypeError, match="values must be a float32 tensor"):
        problem.run(values=problem.values.astype(np.float16))
    scales = np.ones(problem.keys.shape[:3], dtype=np.float32)
    with pytest.raises(ValueError, match="key_scales is given with int8"):
        problem.run(key_scales=scales)
    numbers = {name: np.zeros_like(getattr(problem, name), dtype=np.int8) for name in ("keys", "values")}
    with pytest.raises(ValueError, match="value_scales is given with int8"):
        problem.run(**numbers, key_scales=scales)
    with pytest.raises(ValueError, match="key_scales has 1 along dimension 2; 2"):
        problem.run(**numbers, key_scales=scales[..., :1].copy(), value_scales=scales)
