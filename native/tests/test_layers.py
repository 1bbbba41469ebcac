"""Whole layers against a float64 reference, and bit by bit against the kernels that they are made of."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paceline_native as native
import pytest
from paceline_native.contracts import CACHE_KINDS, KINDS, dequantized_rows, stored
from paceline_native.contracts_layer import (
    DECODER_LAYER,
    LAYER_CASES,
    LayerCase,
    LayerWeights,
    decoder_layer,
    largest_of_rows,
)

from conftest import as_argument, astray, floats

EPS = 1e-5
MAPS = ("qkv", "out", "gate_up", "down")
# A float32 result on the other side of a half is rounded to the next activation: a step of at most 1/127 of the
# largest of its group, in few of many.
ROUNDING = {"float32": 0.0, "bfloat16": 0.0, "int8": 5e-3, "int4": 2e-2}


def unpacked(packed: Any) -> Any:
    shape = packed.description
    out = np.empty((shape["outputs"] * (2 if shape["gated"] else 1), shape["in_features"]), dtype=np.float32)
    packed.unpack(out)
    return out


class Problem:
    """A batch, the pools of some layers, and the layers."""

    def __init__(self, case: LayerCase, kind: str, random: np.random.Generator, layers: int = 2) -> None:
        self.case = case
        self.scale = 1 / math.sqrt(case.head_dim)
        needed = [-(-(cached + new) // case.block_size) for cached, new in case.rows]
        self.counts = [new for _, new in case.rows]
        self.row_starts = np.cumsum([0, *self.counts], dtype=np.int64)
        self.context_lens = np.array([cached + new for cached, new in case.rows], dtype=np.int64)
        free = random.permutation(sum(needed) + 2).tolist()
        self.tables = np.zeros((len(needed), max(needed, default=0)), dtype=np.int64)
        for row, count in enumerate(needed):
            self.tables[row, :count] = [free.pop() for _ in range(count)]
        everything = [self._slots(r, c, c + n) for r, (c, n) in enumerate(case.rows)]
        self.slots = np.concatenate([np.zeros(0, dtype=np.int64), *everything])
        tokens = len(self.slots)
        self.hidden = floats(random, tokens, case.hidden)
        angles = 10 * floats(random, tokens, case.rotary)
        self.cos, self.sin = np.cos(angles), np.sin(angles)

        # What others left in the pool must not matter, however large.
        shape = (sum(needed) + 2, case.block_size, case.kv_heads, case.head_dim)
        self.keys, self.values = ([1e4 * floats(random, *shape) for _ in range(layers)] for _ in range(2))
        self.scales: dict[str, Any] = {}  # of int8 pools
        self.cached = [self._fill(random, layer) for layer in range(layers)]
        self.weights: list[LayerWeights] = []
        self.maps: list[dict[str, Any]] = []
        self.layers: list[Any] = []
        for _ in range(layers):
            self._add_layer(kind, random)

    def _slots(self, row: int, low: int, high: int) -> Any:
        size = self.case.block_size
        return np.array([self.tables[row, p // size] * size + p % size for p in range(low, high)], dtype=np.int64)

    def _fill(self, random: np.random.Generator, layer: int) -> list[tuple[Any, Any]]:
        """Keys and values of the positions before the step's, which are put into the layer's pool too."""
        found = []
        for row, (cached, _) in enumerate(self.case.rows):
            pair = tuple(floats(random, cached, self.case.kv_heads, self.case.head_dim) for _ in range(2))
            for pool, part in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                pool.reshape(-1, *pool.shape[2:])[self._slots(row, 0, cached)] = part
            found.append((pair[0], pair[1]))
        return found

    def keep_as(self, kind: str) -> None:
        """Make the pools that kind's."""
        for name, pools in (("key_scales", self.keys), ("value_scales", self.values)):
            kept = [stored(pool, kind) for pool in pools]
            pools[:] = [as_argument(numbers, kind) for numbers, _ in kept]
            self.scales[name] = [scales for _, scales in kept]

    def _add_layer(self, kind: str, random: np.random.Generator) -> None:
        case = self.case
        mixed, rotating = case.heads * case.head_dim, case.heads + case.kv_heads
        sizes = {
            "qkv": (mixed + 2 * case.kv_heads * case.head_dim, case.hidden),
            "out": (case.hidden, mixed),
            "gate_up": (2 * case.inner, case.hidden),
            "down": (case.hidden, case.inner),
        }
        maps: dict[str, Any] = {}
        weights: dict[str, Any] = {}
        for name, (outputs, inputs) in sizes.items():
            bias = floats(random, outputs) if case.bias else None
            weight = floats(random, outputs, inputs) / np.float32(math.sqrt(inputs))
            maps[name] = native.pack(weight, kind, bias=bias, gated=name == "gate_up")
            weights[name] = (unpacked(maps[name]), bias)
        norms: dict[str, Any] = {name: 1 + 0.1 * floats(random, case.hidden) for name in ("attention_norm", "mlp_norm")}
        qk_norm = 1 + 0.1 * floats(random, rotating, case.head_dim) if case.qk_norm else None
        self.maps.append(maps)
        self.weights.append(LayerWeights(**norms, **weights, qk_norm=qk_norm))
        self.layers.append(
            native.DecoderLayer(
                **norms,
                **maps,
                eps=EPS,
                heads=case.heads,
                kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                scale=self.scale,
                window=case.window,
                activation=case.activation,
                qk_norm=qk_norm,
            )
        )

    def batch(self) -> dict[str, Any]:
        names = ("slots", "tables", "row_starts", "context_lens")
        return {name: getattr(self, name) for name in names}

    def run(self, **changed: Any) -> Any:
        """`run_layers` over a copy of `hidden`, which is returned."""
        names = ("layers", "hidden", "cos", "sin", "keys", "values")
        arguments = {**{name: getattr(self, name) for name in names}, **self.scales, **self.batch(), **changed}
        arguments["hidden"] = arguments["hidden"].copy()
        native.run_layers(**arguments)
        return arguments["hidden"]

    def reference(self) -> Any:
        case, hidden = self.case, self.hidden
        terms: dict[str, Any] = {"eps": EPS, "heads": case.heads, "kv_heads": case.kv_heads, "scale": self.scale}
        for weights, cached, maps in zip(self.weights, self.cached, self.maps, strict=True):
            form = maps["qkv"].description
            rounded: Callable[[Any], Any] = lambda x: x  # noqa: E731
            if form["kind"] in ("int8", "int4"):
                rounded = partial(dequantized_rows, group=form["group"])
            hidden = decoder_layer(
                hidden,
                weights,
                self.cos,
                self.sin,
                cached,
                self.counts,
                window=case.window,
                activation=case.activation,
                rounded=rounded,
                **terms,
            )
        return hidden

    def one_by_one(self) -> Any:
        """The same from the single kernels."""
        case, hidden = self.case, self.hidden.copy()
        tokens, rotating = len(hidden), case.heads + case.kv_heads
        for i, (weights, maps) in enumerate(zip(self.weights, self.maps, strict=True)):
            normal = np.empty_like(hidden)
            qkv = np.empty((tokens, rotating + case.kv_heads, case.head_dim), dtype=np.float32)
            mixed = np.empty((tokens, case.heads, case.head_dim), dtype=np.float32)
            inner = np.empty((tokens, case.inner), dtype=np.float32)
            native.rms_norm(hidden, weights.attention_norm, EPS, normal)
            maps["qkv"](normal, qkv.reshape(tokens, maps["qkv"].out_features))
            for head in range(rotating if case.qk_norm else 0):
                part = np.ascontiguousarray(qkv[:, head])
                native.rms_norm(part, weights.qk_norm[head], EPS, part)
                qkv[:, head] = part
            native.rope(qkv[:, :rotating], self.cos, self.sin)
            native.paged_attention(
                qkv[:, : case.heads],
                qkv[:, case.heads : rotating],
                qkv[:, rotating:],
                self.keys[i],
                self.values[i],
                **self.batch(),
                **{name: scales[i] for name, scales in self.scales.items()},
                out=mixed,
                scale=self.scale,
                **({} if case.window is None else {"window": case.window}),
            )
            maps["out"](mixed.reshape(tokens, case.heads * case.head_dim), hidden, residual=hidden)
            native.rms_norm(hidden, weights.mlp_norm, EPS, normal)
            maps["gate_up"](normal, inner, activation=case.activation)
            maps["down"](inner, hidden, residual=hidden)
        return hidden


def describe(case: LayerCase) -> str:
    return "+".join(f"{cached}:{new}" for cached, new in case.rows) or "nothing"


every_case = pytest.mark.parametrize("case", LAYER_CASES, ids=describe)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_case
@every_kind
def test_contract(isa: str, threads: int, random: np.random.Generator, case: LayerCase, kind: str) -> None:
    problem = Problem(case, kind, random)
    want, found = problem.reference(), problem.run()
    allowed = (DECODER_LAYER.slack * len(problem.layers) + ROUNDING[kind]) * largest_of_rows(want)
    assert found.shape == want.shape
    error = np.abs(found - want)
    assert (error <= allowed).all(), f"error {(error / allowed).max():.3g} of allowed"


@every_case
@every_kind
def test_equals_the_single_kernels(
    isa: str, threads: int, random: np.random.Generator, case: LayerCase, kind: str
) -> None:
    """Bit by bit, the pools too."""
    problem = Problem(case, kind, random)
    found = problem.run()
    written = [pool.copy() for pool in problem.keys + problem.values]
    np.testing.assert_array_equal(found, problem.one_by_one())
    for pool, before in zip(problem.keys + problem.values, written, strict=True):
        np.testing.assert_array_equal(pool, before)


@every_case
@every_kind
def test_wanted_rows_alone(isa: str, threads: int, random: np.random.Generator, case: LayerCase, kind: str) -> None:
    problem = Problem(case, kind, random)
    tokens = len(problem.hidden)
    whole, before_last = (
        problem.run(),
        problem.run(layers=problem.layers[:1], keys=problem.keys[:1], values=problem.values[:1]),
    )
    for wanted in ([], [tokens - 1], [0, tokens - 1, 0], list(range(tokens))):
        if not tokens and wanted:
            continue
        out = astray(np.full((len(wanted), case.hidden), np.nan, dtype=np.float32))
        hidden = problem.run(wanted=np.array(wanted, dtype=np.int64), out=out)
        np.testing.assert_array_equal(hidden, before_last)
        # As many rows together are summed in another order.
        np.testing.assert_allclose(out, whole[wanted], rtol=0, atol=1e-5 * np.abs(whole).max(initial=0))


def test_tensors_may_lie_anywhere(isa: str, random: np.random.Generator) -> None:
    problem = Problem(LAYER_CASES[1], "float32", random)
    want = problem.run()
    hidden = astray(problem.hidden)
    around = hidden.base.copy()
    native.run_layers(
        tuple(problem.layers),
        hidden,
        astray(problem.cos),
        astray(problem.sin),
        tuple(problem.keys),
        tuple(problem.values),
        problem.slots,
        np.pad(problem.tables, ((0, 0), (0, 3)), constant_values=-1)[:, : problem.tables.shape[1]],
        problem.row_starts,
        problem.context_lens,
    )
    np.testing.assert_array_equal(hidden, want)
    hidden[...] = problem.hidden
    np.testing.assert_array_equal(hidden.base, around)  # nothing beside it was written


def test_layers_keep_what_they_were_made_of(isa: str, random: np.random.Generator) -> None:
    problem = Problem(LAYER_CASES[2], "int8", random)
    want = problem.run()
    for weights in problem.weights:
        weights.attention_norm[...] = weights.mlp_norm[...] = np.nan  # copied when the layer was made
    problem.maps.clear()
    np.testing.assert_array_equal(problem.run(), want)


def test_small_batches_after_large_ones(isa: str, threads: int, random: np.random.Generator) -> None:
    """Buffers are kept between calls: what a call left in them must not matter."""
    large, small = (Problem(LAYER_CASES[i], "float32", random) for i in (3, 2))
    want = small.run()
    large.hidden[...] = np.nan
    large.run()
    np.testing.assert_array_equal(small.run(), want)


def _repeat(problem: Problem, want: Any, failures: list[str]) -> None:
    failures.extend("a result differs" for _ in range(30) if not np.array_equal(problem.run(), want))


def test_callers_may_come_at_once(threads: int, random: np.random.Generator) -> None:
    problems = [Problem(LAYER_CASES[i], "int8", random) for i in (1, 2, 4)]
    failures: list[str] = []
    callers = [threading.Thread(target=_repeat, args=(p, p.run(), failures)) for p in problems]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


@pytest.mark.parametrize("cache", CACHE_KINDS)
def test_pools_of_every_kind(isa: str, threads: int, random: np.random.Generator, cache: str) -> None:
    """As the single kernels compute over such pools, bit by bit."""
    problem = Problem(LAYER_CASES[1], "float32", random)
    exact = problem.run()
    problem.keep_as(cache)
    found = problem.run()
    np.testing.assert_array_equal(found, problem.one_by_one())
    assert (cache == "float32") == np.array_equal(found, exact)  # rounded keys and values are what was read


def test_errors_of_a_call_name_the_argument(random: np.random.Generator) -> None:
    problem = Problem(LAYER_CASES[1], "float32", random)
    shorter = [problem.keys[0], problem.keys[1][:3]]
    few = [np.ascontiguousarray(pool[:, :, :1]) for pool in problem.keys]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"layers": []}, ValueError, "layers is empty"),
        ({"layers": [None, None]}, TypeError, "layers must hold instances of DecoderLayer"),
        ({"layers": problem.layers[:1]}, ValueError, "keys has 2 items; 1 were expected"),
        ({"values": problem.values[:1]}, ValueError, "values has 1 items; 2 were expected"),
        ({"values": [None, None]}, TypeError, "values must be"),
        ({"hidden": problem.hidden[:, :39]}, ValueError, "hidden has 39 along dimension 1; 40"),
        ({"hidden": problem.hidden[:-1]}, ValueError, "slots has 12 along dimension 0; 11"),
        ({"cos": problem.cos[:-1]}, ValueError, "sin has 12 along dimension 0; 11"),
        ({"cos": problem.cos[:, :15], "sin": problem.sin[:, :15]}, ValueError, "even number of features"),
        ({"keys": [pool[:, :, :1] for pool in problem.keys]}, ValueError, "keys must be contiguous"),
        ({"keys": few, "values": few}, ValueError, "keys has 1 along dimension 2; 2 was expected"),
        ({"keys": shorter, "values": shorter}, ValueError, "keys has 3 along dimension 0"),
        ({"key_scales": [pool[..., 0].copy() for pool in problem.keys]}, ValueError, "key_scales is given with int8"),
        ({"value_scales": []}, ValueError, "value_scales has 0 items; 2 were expected"),
        ({"slots": problem.slots + 10**6}, ValueError, "slot 10.* is outside the pool"),
        ({"tables": problem.tables - 100}, ValueError, "row 0 names block -"),
        ({"row_starts": problem.row_starts + 1}, ValueError, "row_starts must begin with 0"),
        ({"wanted": np.zeros(1, dtype=np.int64)}, ValueError, "wanted and out are given together"),
        ({"wanted": np.array([12]), "out": problem.hidden[:1]}, ValueError, "wanted names token 12 of 12"),
        ({"wanted": np.array([0]), "out": problem.hidden[:2]}, ValueError, "out has 2 along dimension 0; 1"),
    ]
    for changed, error, match in wrong:
        with pytest.raises(error, match=match):
            problem.run(**changed)


def test_errors_of_a_layer_name_the_part(random: np.random.Generator) -> None:
    problem = Problem(LAYER_CASES[2], "float32", random)
    weights, maps = problem.weights[0], problem.maps[0]
    right: dict[str, Any] = {
        **{name: getattr(weights, name) for name in ("attention_norm", "mlp_norm", "qk_norm")},
        **maps,
        "eps": EPS,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 10,
        "scale": 1.0,
    }
    native.DecoderLayer(**right)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"kv_heads": 2, "qk_norm": None}, "heads is 3; it must be a multiple of kv_heads, 2"),
        ({"head_dim": 5, "qk_norm": None}, "outputs of qkv is 90; 45 was expected"),
        ({"out": maps["down"]}, "inputs of out is 31; 30 was expected"),
        ({"down": maps["out"]}, "inputs of down is 30; 31 was expected"),
        ({"gate_up": maps["qkv"]}, "gate_up must be packed with gated=True"),
        ({"down": maps["gate_up"]}, "gate_up alone is gated"),
        ({"mlp_norm": weights.mlp_norm[:-1]}, "size of mlp_norm is 32; 33 was expected"),
        ({"qk_norm": weights.qk_norm[:-1]}, "qk_norm has 5 along dimension 0; 6 was expected"),
        ({"window": 0}, "window must be at least 1"),
        ({"activation": "mish"}, "activation 'mish'"),
    ]
    for changed, match in wrong:
        with pytest.raises(ValueError, match=match):
            native.DecoderLayer(**{**right, **changed})
