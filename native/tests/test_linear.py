"""Linear maps of every kind against the contract's float64 product."""

from __future__ import annotations

from typing import Any

import numpy as np
import paceline_native as native
import pytest
from paceline_native.contracts import ACTIVATIONS, GROUPS, KINDS, LINEAR, dequantized_rows, linear, rounding_bound

from conftest import astray, floats, within

VARIANTS = (
    [("float32", None, False), ("bfloat16", None, False)]
    + [("int8", group, False) for group in (0, 32, 64, 128)]
    + [("int4", group, minimum) for group in GROUPS for minimum in (False, True)]
)


def unpacked(packed: Any) -> Any:
    shape = packed.description
    channels = shape["outputs"] * (2 if shape["gated"] else 1)
    out = np.empty((channels, shape["in_features"]), dtype=np.float32)
    packed.unpack(out)
    return out


def as_multiplied(x: Any, packed: Any) -> Any:
    """Activations as this kind of weight meets them."""
    if packed.description["kind"] not in ("int8", "int4"):
        return x
    return dequantized_rows(x, packed.description["group"] or None)


def run(packed: Any, x: Any, **kwargs: Any) -> Any:
    out = np.full((len(x), packed.out_features), np.nan, dtype=np.float32)
    packed(x, out, **kwargs)
    return out


@pytest.mark.parametrize("sizes", LINEAR.samples, ids=lambda s: "x".join(map(str, s.values())))
@pytest.mark.parametrize(("kind", "group", "minimum"), VARIANTS)
def test_contract(
    isa: str,
    threads: int,
    random: np.random.Generator,
    kind: str,
    group: int | None,
    minimum: bool,
    sizes: dict[str, int],
) -> None:
    weight, x = floats(random, sizes["outputs"], sizes["inputs"]), floats(random, sizes["rows"], sizes["inputs"])
    packed = native.pack(weight, kind, group=group, minimum=minimum)
    seen = unpacked(packed)
    found = run(packed, x)
    within(found, LINEAR, as_multiplied(x, packed), seen)
    if kind in ("int8", "int4"):
        bound = rounding_bound(x, seen, group or None)
        assert (np.abs(found - linear(x, seen)) <= bound * 1.0001 + 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 33), (7, 64), (40, 5)])
def test_epilogues(
    isa: str, random: np.random.Generator, kind: str, activation: str, gated: bool, rows: int, outputs: int
) -> None:
    channels = outputs * (2 if gated else 1)
    weight, x, bias = floats(random, channels, 65), floats(random, rows, 65), floats(random, channels)
    residual = floats(random, rows, outputs)
    packed = native.pack(weight, kind, bias=bias, gated=gated)
    args = (as_multiplied(x, packed), unpacked(packed), bias, residual.copy(), activation, gated)
    within(run(packed, x, activation=activation, residual=residual), LINEAR, *args)
    packed(x, residual, activation=activation, residual=residual)  # the residual's own place takes the result
    within(residual, LINEAR, *args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_nothing_need_be_aligned(isa: str, random: np.random.Generator, kind: str, rows: int) -> None:
    weight, x, residual = floats(random, 21, 77), floats(random, rows, 77), floats(random, rows, 21)
    bias = floats(random, 21)
    plain = native.pack(weight, kind, bias=bias)
    moved = native.pack(astray(weight), kind, bias=astray(bias))
    want = run(plain, x, residual=residual)
    out = astray(np.zeros_like(want))
    around = out.base.copy()
    moved(astray(x), out, residual=astray(residual))
    np.testing.assert_array_equal(out, want)
    out[...] = 0
    np.testing.assert_array_equal(out.base, around)  # nothing beside the result was written


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_touch_each_other(isa: str, random: np.random.Generator, kind: str) -> None:
    """A row of NaN or infinity is lost and says so; its neighbours in the block are what they would be without it."""
    weight, x = floats(random, 50, 96), floats(random, 9, 96)
    packed = native.pack(weight, kind)
    want = run(packed, x)
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[4, 7] = bad
        found = run(packed, spoilt)
        assert not np.isfinite(found[4]).any()
        np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(want, 4, axis=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e15])
def test_extreme_activations(isa: str, random: np.random.Generator, kind: str, scale: float) -> None:
    weight, x = floats(random, 20, 64), floats(random, 5, 64) * np.float32(scale)
    packed = native.pack(weight, kind)
    within(run(packed, x), LINEAR, as_multiplied(x, packed), unpacked(packed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(isa: str, threads: int, random: np.random.Generator, kind: str) -> None:
    """Or a seed would draw another token when other requests come along."""
    packed, x = native.pack(floats(random, 70, 600), kind), floats(random, 40, 600)
    alone = np.concatenate([run(packed, x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 4, 5, 6, 7, 13, 17, 40):
        assert np.array_equal(run(packed, x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_extreme_weights(isa: str, random: np.random.Generator, kind: str) -> None:
    weight, x = floats(random, 20, 64), floats(random, 5, 64)
    weight *= np.logspace(-35, 15, 20, dtype=np.float32)[:, None]
    weight[3] = 0
    packed = native.pack(weight, kind)
    within(run(packed, x), LINEAR, as_multiplied(x, packed), unpacked(packed))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("group", [0, 64])
def test_largest_products_do_not_saturate(isa: str, sign: int, rows: int, group: int) -> None:
    """All of 127 * 127, over as many inputs as there may be: neither 16 nor 32 bits may overflow."""
    inputs = 65536
    weight = np.full((16, inputs), sign * 127, dtype=np.int8)
    packed = native.pack_int8(weight, np.ones(16, dtype=np.float32), group=group)
    found = run(packed, np.full((rows, inputs), 127, dtype=np.float32))
    np.testing.assert_allclose(found, sign * 127.0 * 127 * inputs, rtol=1e-6)
    nibbles = native.pack_int4(
        np.full((16, inputs), 15, dtype=np.uint8),
        np.ones((16, inputs // 128), dtype=np.float32),
        np.zeros((16, inputs // 128), dtype=np.float32),
        group=128,
    )
    found = run(nibbles, np.full((rows, inputs), sign * 127, dtype=np.float32))
    np.testing.assert_allclose(found, sign * 15.0 * 127 * inputs, rtol=1e-5)


def test_integer_kinds_agree_bit_for_bit_over_instruction_sets(random: np.random.Generator) -> None:
    weight, x = floats(random, 37, 200), floats(random, 11, 200)
    found = []
    before = native.isa()
    for name in native.isas():
        native.use_isa(name)
        found.append(run(native.pack(weight, "int8"), x))
    native.use_isa(before)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_quantized_weights_are_taken_as_they_are(isa: str, random: np.random.Generator) -> None:
    q = random.integers(-127, 128, (19, 45), dtype=np.int8)
    scale = np.abs(floats(random, 19)) + 0.1
    np.testing.assert_array_equal(unpacked(native.pack_int8(q, scale)), q * scale[:, None])
    nibbles = random.integers(0, 16, (19, 45), dtype=np.uint8)
    steps = np.abs(floats(random, 19, 2)).astype(np.float16).astype(np.float32) + np.float32(0.5)
    low = floats(random, 19, 2).astype(np.float16).astype(np.float32)
    steps = steps.astype(np.float16).astype(np.float32)
    wide, base = (np.repeat(a, 32, axis=1)[:, :45] for a in (steps, low))
    symmetric = unpacked(native.pack_int4(nibbles, steps))
    np.testing.assert_array_equal(symmetric, (nibbles.astype(np.float32) - 8) * wide)
    np.testing.assert_allclose(
        unpacked(native.pack_int4(nibbles, steps, low)), nibbles * wide + base, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_quantization_error(isa: str, random: np.random.Generator, kind: str) -> None:
    """What weights lose: bfloat16 a relative 2^-8, int8 half of 1/127 of a channel, int4 half a step of a group."""
    weight = floats(random, 40, 128)
    error = np.abs(unpacked(native.pack(weight, kind)) - weight)
    groups = np.abs(weight).reshape(40, 4, 32).max(axis=2)
    allowed = {
        "float32": 0 * weight,
        "bfloat16": np.abs(weight) / 256,
        "int8": np.repeat(np.abs(weight).max(axis=1, keepdims=True) / 254, 128, axis=1),
        # The far end of a symmetric group has 7 steps where the near one has 8: up to a whole step is cut off there.
        "int4": np.repeat(groups / 8, 32, axis=1),
    }[kind]
    assert (error <= allowed * 1.01 + 1e-7).all()


def test_groups_keep_an_outlier_from_drowning_its_row(isa: str, random: np.random.Generator) -> None:
    """One activation of 1000 among many of about 1: with a scale for each 64 inputs, only its own group is coarse."""
    weight, x = floats(random, 40, 512), floats(random, 3, 512)
    x[:, 100] = 1000
    errors = []
    for group in (0, 64):
        packed = native.pack(weight, "int8", group=group)
        errors.append(np.abs(run(packed, x) - linear(x, unpacked(packed))).mean())
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_bytes_can_be_kept_and_used_again(isa: str, random: np.random.Generator, kind: str, gated: bool) -> None:
    weight, x = floats(random, 34, 70), floats(random, 4, 70)
    packed = native.pack(weight, kind, bias=floats(random, 34), gated=gated, minimum=True)
    want, description = run(packed, x), packed.description
    kept = np.zeros(packed.nbytes + 64, dtype=np.uint8)
    at = -kept.ctypes.data % 64
    kept = kept[at : at + packed.nbytes]
    kept[:] = packed.buffer()
    kept.flags.writeable = False  # as if mapped from a file
    del packed
    again = native.restore(description, kept)
    del kept
    np.testing.assert_array_equal(run(again, x), want)
    assert again.description == description
    with pytest.raises(ValueError, match="bytes"):
        native.restore(description, np.zeros(64, dtype=np.uint8))
    with pytest.raises(ValueError, match="packed for sse"):
        native.restore({**description, "isa": "sse"}, np.zeros(64, dtype=np.uint8))


def test_errors_name_the_argument(isa: str, random: np.random.Generator) -> None:
    weight = floats(random, 6, 8)
    packed = native.pack(weight, "float32")
    x, out = floats(random, 2, 8), np.zeros((2, 6), dtype=np.float32)
    with pytest.raises(TypeError, match="x must be a float32 tensor on the CPU with 2 dimensions"):
        packed(x.astype(np.float64), out)
    with pytest.raises(TypeError, match="out must be"):
        packed(x, object())
    with pytest.raises(ValueError, match="x has 7 along dimension 1; 8 was expected"):
        packed(x[:, :7], out)
    with pytest.raises(ValueError, match="contiguous"):
        packed(np.asfortranarray(x), out)
    with pytest.raises(ValueError, match="activation 'mish'"):
        packed(x, out, activation="mish")
    with pytest.raises(ValueError, match="kind 'int2'"):
        native.pack(weight, "int2")
    with pytest.raises(ValueError, match="group is 48"):
        native.pack(weight, "int4", group=48)
    with pytest.raises(ValueError, match="group is 4; it must be 32, 64 or 128, or 0"):
        native.pack(weight, "int8", group=4)
    with pytest.raises(ValueError, match="even number of channels"):
        native.pack(weight[:5], "float32", gated=True)
    with pytest.raises(ValueError, match="not finite"):
        native.pack(weight * np.float32(np.nan), "int8")
    with pytest.raises(ValueError, match="-128"):
        native.pack_int8(np.full((2, 8), -128, dtype=np.int8), np.ones(2, dtype=np.float32))
    with pytest.raises(ValueError, match="float16"):
        native.pack(weight * np.float32(1e9), "int4")


@pytest.mark.parametrize(("kind", "group", "minimum"), VARIANTS)
@pytest.mark.parametrize("count", [0, 1, 9, 700])
def test_rows_of_the_weight(
    isa: str, threads: int, random: np.random.Generator, kind: str, group: int | None, minimum: bool, count: int
) -> None:
    """An embedding lookup on a head that is tied to it."""
    packed = native.pack(floats(random, 77, 101), kind, bias=floats(random, 77), group=group, minimum=minimum)
    ids = random.integers(0, 77, count)
    out = astray(np.full((count, 101), np.nan, dtype=np.float32))
    packed.rows(ids, out)
    np.testing.assert_array_equal(out, unpacked(packed)[ids])


def test_errors_of_rows_name_the_argument(random: np.random.Generator) -> None:
    packed = native.pack(floats(random, 6, 8), "int8")
    out = np.empty((1, 8), dtype=np.float32)
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"ids names row {wrong} of a map that has 6"):
            packed.rows(np.array([wrong]), out)
    with pytest.raises(ValueError, match="out has 1 along dimension 0; 2 was expected"):
        packed.rows(np.array([0, 1]), out)
    with pytest.raises(TypeError, match="ids must be a int64"):
        packed.rows(np.array([0], dtype=np.int32), out)
    with pytest.raises(ValueError, match="a gated map has no rows"):
        native.pack(floats(random, 6, 8), "int8", gated=True).rows(np.array([0]), out)
