"""The native CPU kernels against this machine's limits, measured in the same run, and against torch on the same data.

Limits: memory read (one long sum), and the best matrix multiplies that torch (BLAS, oneDNN's packed linear, FBGEMM's
dynamic int8 linear) or these kernels reach. For every kind of weight and row count: the rate, its fraction of
the limits, and torch's float32 time over ours. A fraction above 100 % of memory's limit says that the weights were in
a cache. Times are CPU seconds of one thread by default, least of many short runs, so that a busy machine disturbs them
little; `--threads N` takes wall time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import Report, arguments
from _cpu.limits import Clock, Limits, measure_limits
from torch import Tensor

from paceline.runtime.batch import batch_of
from paceline.runtime.kernels import attention
from paceline.runtime.kernels.kvpool import KVPool, KVSpec
from paceline.runtime.kernels.native import native, paged_attention, unavailable
from paceline.runtime.layers.linear import Linear
from paceline.runtime.layers.rope import apply_rope

KINDS = ("float32", "bfloat16", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# (outputs, inputs) of the maps of a 135M, a 0.5B and a 1B model; the last is a head.
SHAPES = ((960, 576), (3072, 576), (576, 1536), (9728, 896), (896, 4864), (2048, 8192), (49152, 576))
ATTENTION = {
    "1 decode, context 200": [(200, 1)],
    "16 decodes, context 200": [(200, 1)] * 16,
    "8 decodes, context 2000": [(2000, 1)] * 8,
    "1 decode, context 8000": [(8000, 1)],
    "prefill of 512": [(0, 512)],
    "chunk of 64 at 2000": [(2000, 64)],
    "8 decodes at 300 and a chunk of 128 at 1000": [(300, 1)] * 8 + [(1000, 128)],
}


def main() -> None:
    args = arguments(__doc__, _flags)
    reason = unavailable()
    if reason is not None:
        raise SystemExit(f"cpu_kernels: {reason}")
    kernels = native()
    torch.set_num_threads(args.threads)
    kernels.set_threads(args.threads, spin_us=args.spin_us)
    report = Report("cpu_kernels", args)
    report.note("threads", args.threads)
    clock = Clock(args.threads, quick=args.quick)
    with torch.inference_mode():
        limits = measure_limits(report, clock)
        for isa in [args.isa] if args.isa else kernels.isas():
            kernels.use_isa(isa)
            linear(report, clock, limits, isa, quick=args.quick)
            attend(report, clock, limits, isa, quick=args.quick)
            row_by_row(report, clock, isa, quick=args.quick)
    report.finish()


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="of kernels and torch alike (default 1: CPU time)")
    parser.add_argument("--spin-us", type=int, default=50, help="how long an idle kernel thread spins (default 50)")
    parser.add_argument("--isa", help="this instruction set alone; default all that the processor has")


@contextmanager
def shown(report: Report, label: str, seconds: list[float], reference: list[float] | None) -> Iterator[list[str]]:
    """One row of the report: times, and the facts that the body puts into the list."""
    facts: list[str] = []
    yield facts
    if reference is not None:
        facts.append(f"torch/ours {min(reference) / min(seconds):.2f}")
    report.add(f"{label}: {', '.join(facts)}", [value * 1e6 for value in seconds], "us")


def linear(report: Report, clock: Clock, limits: Limits, isa: str, *, quick: bool) -> None:
    """Every kind of weight at every row count."""
    for outputs, inputs in SHAPES[1:2] if quick else SHAPES:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        reference = Linear(weight)
        torch_seconds: dict[int, list[float]] = {}
        for kind in KINDS:
            packed = native().pack(weight, kind)
            for rows in ROWS[::4] if quick else ROWS:
                x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
                if rows not in torch_seconds:
                    torch_seconds[rows] = clock(partial(reference, x))
                seconds = clock(partial(packed, x, out))
                label = f"{isa} linear {outputs}x{inputs} {kind} {rows} rows"
                with shown(report, label, seconds, torch_seconds[rows]) as facts:
                    rate, read = 2 * rows * outputs * inputs / min(seconds), packed.nbytes / min(seconds)
                    facts.append(f"{rate / 1e9:.0f} GFLOP/s = {rate / limits.of(kind):.0%} of the limit")
                    facts.append(f"{read / 1e9:.1f} GB/s = {read / limits.read:.0%} of memory's")


def attend(report: Report, clock: Clock, limits: Limits, isa: str, *, quick: bool) -> None:
    """Heads as in the 135M model: 9 of 64 features that share 3 keys."""
    for name, rows in list(ATTENTION.items())[:: 4 if quick else 1]:
        ours, theirs, operations, kv_bytes = attention_pair(rows)
        seconds = clock(ours)
        with shown(report, f"{isa} attention, {name}", seconds, clock(theirs)) as facts:
            rate, read = operations / min(seconds), kv_bytes / min(seconds)
            facts.append(f"{rate / 1e9:.0f} GFLOP/s = {rate / limits.flops:.0%}")
            facts.append(f"{read / 1e9:.1f} GB/s = {read / limits.read:.0%}")


def attention_pair(
    rows: list[tuple[int, int]], heads: int = 9, kv_heads: int = 3, dim: int = 64, block_size: int = 16
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int, int]:
    """(native call, torch call, multiplications and additions, bytes of keys and values) over shuffled blocks."""
    needed = [-(-(cached + new) // block_size) for cached, new in rows]
    pool = KVPool([KVSpec(kv_heads, dim, dim)], sum(needed) + 1, block_size)
    pool.keys[0].normal_()
    pool.values[0].normal_()
    free = np.random.default_rng(0).permutation(sum(needed)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    sequences = [[0] * (cached + new) for cached, new in rows]
    starts = [cached for cached, _ in rows]
    batch = batch_of(sequences, starts, tables, block_size=block_size, scratch_block=pool.scratch_block)
    q = torch.randn(batch.num_tokens, heads, dim)
    k, v = torch.randn(2, batch.num_tokens, kv_heads, dim)

    def call(kernel: Callable[..., Tensor]) -> Callable[[], Tensor]:
        return lambda: kernel(q, k, v, pool, 0, batch, scale=dim**-0.5)

    pairs = sum(cached * new + new * (new + 1) // 2 for cached, new in rows)
    kv_bytes = sum(cached + new for cached, new in rows) * kv_heads * dim * 8
    return call(paged_attention), call(attention.paged_attention), 4 * pairs * heads * dim, kv_bytes


def row_by_row(report: Report, clock: Clock, isa: str, *, quick: bool) -> None:
    """What stands between the maps: norms, gates, rotations, and the largest of the logits."""
    kernels = native()
    for rows in (16,) if quick else (1, 16, 512):
        for name, ours, theirs in row_pairs(kernels, rows):
            seconds = clock(ours)
            with shown(report, f"{isa} {name} {rows} rows", seconds, clock(theirs)):
                pass


def row_pairs(kernels: Any, rows: int) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """(name, native call, torch call) at the sizes of the 135M model."""
    x, weight, out = torch.randn(rows, 576), torch.randn(576), torch.empty(rows, 576)
    yield (
        "rms_norm 576",
        lambda: kernels.rms_norm(x, weight, 1e-5, out),
        lambda: F.rms_norm(x, (576,), weight, 1e-5),
    )
    both, gated = torch.randn(rows, 3072), torch.empty(rows, 1536)
    yield "swiglu 1536", lambda: kernels.gate(both, gated), lambda: F.silu(both[:, :1536]).mul_(both[:, 1536:])
    heads, cos, sin = torch.randn(rows, 12, 64), torch.randn(rows, 64), torch.randn(rows, 64)
    yield "rope 12x64", lambda: kernels.rope(heads, cos, sin), lambda: apply_rope(heads, cos, sin)
    logits = torch.randn(min(rows, 64), 49152)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    yield f"argmax 49152 ({len(logits)})", lambda: kernels.argmax(logits, tokens), lambda: logits.argmax(-1)


if __name__ == "__main__":
    main()
