"""What the machine gives: memory read, and the best matrix multiplications that anybody here reaches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _common import Report
from torch import Tensor

from paceline.runtime.kernels.native import native, unavailable
from paceline.runtime.layers.linear import Linear

ROWS, OUTPUTS, INPUTS = 512, 2048, 1024  # of the products that limits are taken from


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine gives on as many threads as are measured."""

    read: float  # bytes a second from memory
    flops: float  # operations a second of a float32 matrix multiply
    int8: float  # and of an int8 one

    def of(self, kind: str) -> float:
        """The limit of a product with weights of this kind."""
        return self.int8 if kind in ("int8", "int4") else self.flops


class Clock:
    """Seconds of a piece of work: several short samples, each the least of its repeats."""

    def __init__(self, threads: int, *, quick: bool) -> None:
        # Seconds that a thread had a core are not those it waited for one.
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self._samples, self._seconds = (3, 0.02) if quick else (5, 0.1)

    def __call__(self, work: Callable[[], object]) -> list[float]:
        work()
        return [self._least(work) for _ in range(self._samples)]

    def _least(self, work: Callable[[], object]) -> float:
        least, until = float("inf"), time.perf_counter() + self._seconds
        while True:
            began = self._now()
            work()
            least = min(least, self._now() - began)
            if time.perf_counter() >= until:
                return least


def measure_limits(report: Report | None, clock: Clock) -> Limits:
    """Memory read beyond every cache, and the best of torch's matrix multiplies and ours, with our threads."""

    def told(name: str, rates: list[float], unit: str) -> float:
        if report is not None:
            report.add(f"limit: {name}", [value / 1e9 for value in rates], unit)
        return max(rates)

    data = torch.ones(64 * 2**20)  # 256 MiB
    read = told("memory read", [data.nbytes / seconds for seconds in clock(data.sum)], "GB/s")
    best: dict[str, float] = {}
    for name, kind, call, operations in _products():
        rate = told(name, [operations / seconds for seconds in clock(call)], "GFLOP/s")
        best[kind] = max(rate, best.get(kind, 0.0))
    return Limits(read, best["float32"], best["int8"])


def _products() -> list[tuple[str, str, Callable[[], object], int]]:
    """(name, kind, call, operations) of every way to multiply matrices."""
    x, weight, square = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.rand(1024, 1024)
    few = x[:64].contiguous()
    packed, quantized = Linear(weight), _fbgemm(weight)
    of_many, of_few = 2 * ROWS * OUTPUTS * INPUTS, 2 * len(few) * OUTPUTS * INPUTS
    found: list[tuple[str, str, Callable[[], object], int]] = [
        ("float32 matrix multiply, BLAS", "float32", partial(torch.matmul, square, square), 2 * 1024**3),
        ("float32 linear of 64 rows, oneDNN", "float32", partial(packed, few), of_few),
        ("int8 linear of 64 rows, FBGEMM", "int8", partial(quantized, few), of_few),
        ("int8 linear of 512 rows, FBGEMM", "int8", partial(quantized, x), of_many),
    ]
    if unavailable() is None:
        out = torch.empty(ROWS, OUTPUTS)
        for kind in ("float32", "int8"):
            ours = native().pack(weight, kind)
            found.append((f"{kind} linear of 512 rows, our kernel", kind, partial(ours, x, out), of_many))
    return found


def _fbgemm(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """torch's own int8 linear: weights quantized for each channel, activations as they come."""
    scales = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantized tensors are to move to another package
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)
