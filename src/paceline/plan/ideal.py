"""The textbook layer: a model and its chips as a handful of numbers from datasheets, and the two formulas of a step.

Decode reads every weight once a step and the KV cache of every sequence; prefill multiplies every token with every
active weight. No kernel reaches this; the answers put the cost model's expectation beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.plan.formula import Amount, Formula
from paceline.plan.units import Unit

DECODE_STEP = "batch * kv_per_sequence / bandwidth + max(2 * active * batch / peak, weights / bandwidth)"
READING = "(weights + batch * kv_per_sequence) / bandwidth"  # the same where the chip's rate is not known
PREFILL = "max((2 * active * tokens + attention) / peak, weights / bandwidth)"

_decode_step = Formula(DECODE_STEP)
_prefill = Formula(PREFILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One replica. `peak` and `bandwidth` are those of the chips that work on a token at the same time.

    A mixture of experts reads only the experts that some token of the batch is routed to: `routed` of the weights are
    split over `experts`, of which each token takes `top_k`, evenly.
    """

    params: float
    active: float  # parameters that one token multiplies with
    weights: float  # bytes of all parameters
    bandwidth: float  # bytes/s
    peak: float = math.inf  # FLOP/s; infinite where the vendor publishes none
    routed: float = 0.0  # bytes of `weights` that belong to routed experts
    experts: int = 1
    top_k: int = 1

    @property
    def knows_compute(self) -> bool:
        return math.isfinite(self.peak)

    @property
    def ridge(self) -> float:
        """FLOP/byte at which the chip's memory and its multipliers are equally busy."""
        return self.peak / self.bandwidth

    def read(self, batch: float) -> float:
        """Bytes of weights that a step of `batch` tokens touches: those of every expert with at least one token."""
        if not self.routed:
            return self.weights
        touched = 1.0 - math.pow(1.0 - self.top_k / self.experts, batch)
        return self.weights - self.routed * (1.0 - touched)

    def decode_s(self, batch: float, kv_per_sequence: float) -> float:
        """A step of `batch` sequences, one token each."""
        return _decode_step(
            batch=batch,
            kv_per_sequence=kv_per_sequence,
            bandwidth=self.bandwidth,
            active=self.active,
            peak=self.peak,
            weights=self.read(batch),
        )

    def prefill_s(self, tokens: float, attention: float = 0.0) -> float:
        """A prompt of `tokens` alone; `attention` is the FLOPs of its query-key pairs."""
        return _prefill(
            active=self.active,
            tokens=tokens,
            attention=attention,
            peak=self.peak,
            weights=self.read(tokens),
            bandwidth=self.bandwidth,
        )

    def decode_binds(self, batch: float, kv_per_sequence: float) -> str:
        """What takes most of a decode step's time."""
        kv_s = batch * kv_per_sequence / self.bandwidth
        weights_s, compute_s = self.read(batch) / self.bandwidth, 2.0 * self.active * batch / self.peak
        return max((weights_s, WEIGHTS), (kv_s, KV), (compute_s, COMPUTE))[1]

    @property
    def amounts(self) -> dict[str, Amount]:
        """Its numbers under the names that formulas use."""
        return {
            "params": Amount(self.params, Unit.PARAMETERS),
            "active": Amount(self.active, Unit.PARAMETERS),
            "weights": Amount(self.weights, Unit.BYTES),
            "bandwidth": Amount(self.bandwidth, Unit.BYTES_PER_S),
            "peak": Amount(self.peak, Unit.OPERATIONS_PER_S),
        }


# What binds, in words.
WEIGHTS = "reading the weights"
KV = "reading the KV cache"
COMPUTE = "compute"
CAPACITY = "memory for KV"


def best_batch(step_s: Callable[[int], float], most: int) -> int:
    """The knee of a batch-latency-throughput curve: where throughput / latency is greatest (Kleinrock's power).

    For a step of a + b x batch seconds that is batch = a / b: half of the throughput there is, at twice the latency
    of one stream. Earlier, a little latency buys much throughput; later it is the other way round.
    """
    return max(batches(most), key=lambda batch: batch / step_s(batch) ** 2)


def batches(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to and with `most`: two points for each doubling."""
    found = {round(2.0 ** (half / 2)) if half % 2 == 0 else round(1.5 * 2.0 ** (half // 2)) for half in range(40)}
    return sorted({batch for batch in found if batch < most} | {max(most, 1)})
