"""Dense matrix multiply: tiles in waves, a chain of steps along k, weights from memory, operands through the L2 cache.

A library picks, for each shape, the output tile and the number of pieces that k is cut into ("split-k"). So does this
curve: it takes the fastest of the usual tiles and splits. What makes a shape slow:

- tiles come in whole waves over the multiprocessors: one tile more than they can hold costs a wave (a step at
  m = 129 that weights' share of the bandwidth cannot explain);
- few tokens are padded to the rows that the units take at a time, which binds where arithmetic is scarce for the bytes
  of a weight (narrow weights, chips of low intensity);
- a tile of m x n does m * n / (m + n) multiplies for each number it loads: small tiles starve the matrix units;
- each step along k has a latency that cannot be shortened by idle multiprocessors, which is why few tiles with a long
  k are split, and why splitting costs a reduction;
- weights, inputs and outputs move once at the share of the bandwidth that a long stream reaches; the tiles together
  read them many times over from L2.

Formats below 16 bits need their inputs quantised: once more through memory where that is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.cost.curves.timing import KernelTime

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STEP = 64  # numbers along k that a tile takes at a time
NARROW_GRAIN = 16  # rows of the smallest tile, where narrow weights are widened (made for few tokens: Marlin, AWQ)
SUM_BYTES = 8.0  # a split tile's partial sums: 4 bytes written, 4 read


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Constants of a family's matrix multiplies. Defaults are between the two measured families."""

    floor_s: float = 3.0e-6  # launch, first loads, last stores
    step_s: float = 0.1e-6  # latency of one step along k
    split_s: float = 2.0e-6  # a second kernel that adds the pieces up
    hbm_share: float = 0.80  # of the memory's bandwidth
    l2_ratio: float = 3.0  # bandwidth of L2 over that of memory
    grain: int = 16  # rows that the units multiply at a time: what a tile of fewer is padded to
    half_intensity: float = 12.0  # multiplies per number loaded at which the matrix units are half busy
    peak_share: Mapping[str, float] = field(default_factory=lambda: {"fp8": 0.77, "fp4": 0.65, "int8": 0.77})
    weight_only_share: float = 0.85  # of the peak, where narrow weights are widened on their way in
    quantise_s: float = 0.0  # an extra kernel for inputs below 16 bits; 0: part of the kernel before
    quantise_share: float = 0.80  # of the bandwidth that it reaches

    def time(
        self, m: int, n: int, k: int, *, peak: float, bandwidth: float, sms: int, dtype: str, weight_bytes: float
    ) -> KernelTime:
        """[m, k] x [k, n]. `peak` in FLOP/s of `dtype`, `bandwidth` in bytes/s."""
        narrow = dtype != "bf16" and dtype != "fp32"
        input_bytes = 1.0 if narrow else 2.0
        share, grain = self.peak_share.get(dtype, 1.0), self.grain
        if not narrow and weight_bytes < 2.0:
            share = self.weight_only_share
            grain = min(grain, NARROW_GRAIN)
        memory_s = (weight_bytes * n * k + input_bytes * m * k + 2.0 * m * n) / (self.hbm_share * bandwidth)
        l2_s = 1.0 / (self.l2_ratio * bandwidth)  # per byte
        best_s, best_compute_s, best_memory_s, best_latency_s = float("inf"), 0.0, 0.0, 0.0
        for tile_m, tile_n in TILES:
            tiles = -(-m // tile_m) * -(-n // tile_n)
            loaded = min(tile_m, m) * input_bytes + min(tile_n, n) * weight_bytes  # bytes for a step of one along k
            busy = share * tile_m * tile_n / (tile_m * tile_n + self.half_intensity * (tile_m + tile_n))
            rows = min(tile_m, -(-m // grain) * grain)
            flop_s = 2.0 * rows * tile_n * sms / (peak * busy)
            for split in SPLITS:
                if split > 1 and tiles >= sms:
                    break  # multiprocessors are busy without
                steps = -(-k // (split * STEP))
                waves = -(-tiles * split // sms)
                compute_s = waves * steps * STEP * flop_s
                latency_s = waves * steps * self.step_s
                traffic_s = max(memory_s, tiles * split * steps * STEP * loaded * l2_s)
                added_s = self.split_s + split * m * n * SUM_BYTES / bandwidth if split > 1 else 0.0
                total_s = max(compute_s, latency_s, traffic_s) + added_s
                if total_s < best_s:
                    best_s, best_latency_s = total_s, latency_s + added_s
                    best_compute_s, best_memory_s = compute_s, traffic_s
        fixed_s = self.floor_s
        if narrow:
            fixed_s += self.quantise_s + 3.0 * m * k / (self.quantise_share * bandwidth)
        longest = max(best_compute_s, best_memory_s)
        if max(fixed_s, best_latency_s) > longest:
            bound = "latency"
        else:
            bound = "compute" if best_compute_s > best_memory_s else "memory"
        return KernelTime(fixed_s + best_s, bound)
