"""Kernels that work row by row, the threads, and what the module says about itself."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import paceline_native as native
import pytest
from paceline_native.contracts import ACTIVATIONS, ARGMAX, GATE, RMS_NORM, ROPE

from conftest import astray, floats, within


def ids(sizes: dict[str, int]) -> str:
    return "x".join(map(str, sizes.values()))


@pytest.mark.parametrize("sizes", RMS_NORM.samples, ids=ids)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_rms_norm(isa: str, threads: int, random: np.random.Generator, sizes: dict[str, int], scale: float) -> None:
    x = floats(random, sizes["rows"], sizes["columns"]) * np.float32(scale)
    weight, residual = floats(random, sizes["columns"]), floats(random, *x.shape) * np.float32(scale)
    out = np.full_like(x, np.nan)
    native.rms_norm(astray(x), weight, 1e-6, out)
    within(out, RMS_NORM, x, weight, 1e-6)
    total = x + residual
    native.rms_norm(x, weight, 1e-6, out, residual=residual)
    np.testing.assert_array_equal(residual, total)
    within(out, RMS_NORM, total, weight, 1e-6)
    native.rms_norm(x, weight, 1e-6, x)  # in place
    assert x.shape == out.shape


@pytest.mark.parametrize("sizes", GATE.samples, ids=ids)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 60.0])
def test_gate(
    isa: str, threads: int, random: np.random.Generator, sizes: dict[str, int], activation: str, scale: float
) -> None:
    x = floats(random, sizes["rows"], 2 * sizes["columns"])
    x[:, : sizes["columns"]] *= np.float32(scale)
    out = astray(np.zeros((sizes["rows"], sizes["columns"]), dtype=np.float32))
    native.gate(astray(x), out, activation=activation)
    within(out, GATE, x, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends(isa: str, activation: str) -> None:
    ends = np.array([[0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 1e30, -1e30, 1e-38, -1e-38, 0.1499, 0.1501]], dtype=np.float32)
    out = np.zeros_like(ends)
    native.gate(np.concatenate((ends, np.ones_like(ends)), axis=1), out, activation=activation)
    assert np.isfinite(out).all()
    within(out, GATE, np.concatenate((ends, np.ones_like(ends)), axis=1), activation)
    native.gate(np.array([[np.nan, 1.0]], dtype=np.float32), out[:, :1], activation=activation)
    assert np.isnan(out[0, 0])


@pytest.mark.parametrize("sizes", ROPE.samples, ids=ids)
def test_rope(isa: str, threads: int, random: np.random.Generator, sizes: dict[str, int]) -> None:
    x = floats(random, sizes["rows"], sizes["heads"], sizes["dim"])
    angles = 100 * floats(random, sizes["rows"], sizes["rotary"])
    cos, sin = np.cos(angles), np.sin(angles)
    found = x.copy()
    native.rope(found, cos, sin)
    within(found, ROPE, x, cos, sin)


@pytest.mark.parametrize("sizes", ARGMAX.samples, ids=ids)
def test_argmax(isa: str, threads: int, random: np.random.Generator, sizes: dict[str, int]) -> None:
    x = floats(random, sizes["rows"], sizes["columns"])
    for change in ("as it is", "ties", "infinities", "nan", "all -inf"):
        if x.size and change == "ties":
            x[:, -1] = x[:, sizes["columns"] // 2] = x.max() + 1
        elif x.size and change == "infinities":
            x[:, sizes["columns"] // 3] = np.inf
            x[:, 0] = -np.inf
        elif x.size and change == "nan":
            x[-1, sizes["columns"] // 2] = np.nan
        elif change == "all -inf":
            x[...] = -np.inf
        out = np.full(sizes["rows"], -1, dtype=np.int64)
        native.argmax(astray(x), out)
        np.testing.assert_array_equal(out, np.argmax(x, axis=1) if x.size else out)


def test_errors_name_the_argument(random: np.random.Generator) -> None:
    x = floats(random, 2, 8)
    with pytest.raises(ValueError, match="weight has 7"):
        native.rms_norm(x, x[0, :7], 1e-6, x)
    with pytest.raises(ValueError, match="x has 8 along dimension 1; 6"):
        native.gate(x, x[:, :3])
    with pytest.raises(ValueError, match="even number of features"):
        native.rope(floats(random, 2, 1, 8), x[:, :5], x[:, :5])
    with pytest.raises(TypeError, match="out must be a int64"):
        native.argmax(x, x[:, 0])


def test_instruction_sets() -> None:
    assert native.isa() in native.isas()
    with pytest.raises(ValueError, match="instruction set 'neon' is not one that this processor has"):
        native.use_isa("neon")


def test_thread_settings() -> None:
    before = native.threads()
    native.set_threads(2, spin_us=7, cores=[0, 0])
    assert native.threads() == {"threads": 2, "spin_us": 7, "cores": [0, 0]}
    native.set_threads(**before)
    for wrong, match in (({"threads": 0}, "threads is 0"), ({"threads": 1, "spin_us": -1}, "spin_us is -1")):
        with pytest.raises(ValueError, match=match):
            native.set_threads(**wrong)
    with pytest.raises(ValueError, match="cores names -4"):
        native.set_threads(1, cores=[-4])
    assert native.threads() == before


def _hammer(packed: Any, x: Any, want: Any, rounds: int, failures: list[str]) -> None:
    out = np.empty_like(want)
    for _ in range(rounds):
        packed(x, out)
        if not np.array_equal(out, want):
            failures.append("a result differs")
            return


def test_callers_may_come_at_once_and_settings_may_change_meanwhile(threads: int, random: np.random.Generator) -> None:
    x, packed = floats(random, 30, 256), native.pack(floats(random, 512, 256), "float32")
    want = np.empty((30, 512), dtype=np.float32)
    packed(x, want)
    failures: list[str] = []
    callers = [threading.Thread(target=_hammer, args=(packed, x, want, 200, failures)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for count in (1, 4, 2, 3):
        native.set_threads(count, spin_us=1)
    for caller in callers:
        caller.join()
    assert not failures


@pytest.mark.skipif(native._core.SANITIZED, reason="a forked child of a sanitized process may hang")
@pytest.mark.filterwarnings("ignore:This process")  # a child of a process with threads: what is tried here
def test_a_forked_child_has_threads_of_its_own(random: np.random.Generator) -> None:
    before = native.threads()
    native.set_threads(3, spin_us=1)
    x, packed = floats(random, 30, 256), native.pack(floats(random, 512, 256), "float32")
    want, out = np.empty((2, 30, 512), dtype=np.float32)
    packed(x, want)
    child = os.fork()
    if child == 0:
        packed(x, out)
        os._exit(0 if np.array_equal(out, want) else 1)
    _, status = os.waitpid(child, 0)
    native.set_threads(**before)
    assert status == 0
