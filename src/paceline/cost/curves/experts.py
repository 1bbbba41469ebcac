"""Experts of one layer: a matrix multiply whose rows are sorted by the expert that they go to.

- The weights of every expert that some token chose are read, whole, at a share of the bandwidth; a batch of a few
  tokens touches nearly as many experts as it has choices, a large one all of them.
- Each expert's rows are padded to a tile: on average half a tile for each expert touched. What that costs is loading
  the tile's share of inputs and weights into the multiprocessor rather than multiplying by nothing: on a chip of the
  same generation with slower matrix units (an H20) it is as much time, and fewer rows. Half of the smallest tile
  remains.
- Loading and multiplying overlap only in part in these kernels (a p-norm between sum and maximum).
- A tile has to be tuned for the number of experts and their width. Where nobody has (vLLM then says "Using default MoE
  config"), the matrix units do half of what they could, and once the rows of an expert outgrow the cache, less.
- Widths that are no multiple of 16 (an odd tensor-parallel degree) cannot use wide loads.
- Every choice of every token is gathered, activated and summed, also those of experts that live elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cost.curves.timing import NOTHING, KernelTime

ALIGNED = 16  # numbers that a wide load takes
STEP = 64  # numbers along the inner dimension that a tile takes at a time
NUMBER = 2.0  # bytes of an activation
SMALLEST = 16.0  # rows of the smallest tile


@dataclass(frozen=True, slots=True)
class ExpertsCurve:
    """Constants of a family's grouped multiplies."""

    floor_s: float = 20.0e-6  # sorting, two multiplies, activation, sum
    step_s: float = 0.3e-6  # latency of a step along the inner dimension
    hbm_share: float = 0.85  # of the bandwidth
    stream_share: float = 0.60  # of the bandwidth, for activations
    padding: float = 64.0  # rows of a tile
    overlap: float = 1.7  # p of the p-norm of loading and multiplying; 1: no overlap
    tuned_share: float = 0.55  # of the peak
    default_share: float = 0.30
    unaligned: float = 1.5  # times as slow
    spill_bytes: float = 10e6  # rows of one expert from which on an untuned tile reloads them
    spill: float = 0.5  # times as slow again, at most
    tuned: bool = True

    def time(
        self,
        choices: float,
        touched: float,
        all_choices: float,
        *,
        hidden: int,
        inter: int,
        matrices: int,
        weight_bytes: float,
        peak: float,
        bandwidth: float,
        strength: float = 1.0,
    ) -> KernelTime:
        """`choices` of the tokens for `touched` experts of this chip; `all_choices` also for those elsewhere.

        `strength` is the rate of a multiprocessor over that of the chip which the constants were found on.
        """
        if all_choices <= 0:
            return NOTHING
        numbers = float(matrices * hidden * inter)
        slow = self.unaligned if inter % ALIGNED else 1.0
        share = self.tuned_share if self.tuned else self.default_share
        padding = max(min(SMALLEST, self.padding), self.padding * min(1.0, strength))
        compute_s = 2.0 * (choices + touched * padding / 2.0) * numbers * slow / (peak * share)
        if not self.tuned:
            crowd = (choices / max(touched, 1.0) * hidden * NUMBER / self.spill_bytes) ** 2
            compute_s *= 1.0 + self.spill * crowd / (1.0 + crowd)
        memory_s = touched * numbers * weight_bytes * slow**0.5 / (bandwidth * self.hbm_share)
        both_s = (compute_s**self.overlap + memory_s**self.overlap) ** (1.0 / self.overlap)
        # Gathered into order, widened by the activation (three passes over `inter`), summed over a token's choices.
        moved = NUMBER * (2.0 * choices * hidden + all_choices * (3.0 * inter + hidden))
        fixed_s = self.floor_s + (hidden + inter) / STEP * self.step_s
        seconds = fixed_s + both_s + moved / (bandwidth * self.stream_share)
        if fixed_s > both_s:
            return KernelTime(seconds, "latency")
        return KernelTime(seconds, "compute" if compute_s > memory_s else "memory")


def touched_evenly(tokens: float, experts: int, topk: int) -> float:
    """Expected number of experts that at least one of `tokens` picks, each picking `topk` of `experts` evenly."""
    missed: float = (1.0 - min(1.0, topk / experts)) ** tokens
    return experts * (1.0 - missed)
