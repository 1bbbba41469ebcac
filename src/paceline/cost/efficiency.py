"""How long one GPU kernel takes: what the datasheet allows, and the mechanisms that keep kernels below it.

Every curve is a handful of constants with a physical meaning (a launch floor, a share of the peak, tiles that come in
waves, bytes in flight that are needed before memory runs at full speed), so that it carries over to a chip nobody has
measured: the datasheet's peaks go in, the family's constants stay. `docs/efficiency.md` explains each constant and
gives its error against measured kernels. `cost/tables.py` answers the same questions from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol


class KernelTime(NamedTuple):
    """Seconds of one kernel, what binds it (`compute`, `memory`, `latency`, `link`), and whether the source knows."""

    seconds: float
    bound: str
    known: bool = True


class Kernels(Protocol):
    """Times of the kernels of a transformer step on one chip. Sizes are those of one rank."""

    def gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", weight_bytes: float = 2.0) -> KernelTime:
        """[m, k] x [k, n] with weights stored in `weight_bytes` each and multiplied in `dtype`."""
        ...

    def experts(
        self,
        tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        *,
        ep: int = 1,
        dtype: str = "bf16",
        weight_bytes: float = 2.0,
        matrices: int = 3,
    ) -> KernelTime:
        """The feed-forward experts of one layer that live here: `experts` / `ep` of them, each `inter` wide here."""
        ...

    def decode_attention(
        self,
        rows: int,
        context: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int = 128,
        kv_bytes: float = 2.0,
        latent: bool = False,
    ) -> KernelTime:
        """One query a row against `context` KV positions over all rows. `latent`: keys and values are one vector."""
        ...

    def prefill_attention(
        self, rows: int, tokens: int, pairs: int, *, heads: int, kv_heads: int, head_dim: int = 128
    ) -> KernelTime:
        """`tokens` queries in `rows` rows with `pairs` query-key pairs in all (causal: counted once)."""
        ...

    def allreduce(self, nbytes: float, gpus: int) -> KernelTime:
        """Sum of `nbytes` on each of `gpus` chips, to all of them."""
        ...

    def stream(self, nbytes: float) -> KernelTime:
        """An element-wise kernel (norm, activation, rotary, cache write) that moves `nbytes`."""
        ...


@dataclass(frozen=True, slots=True)
class Silicon:
    """What a datasheet says of one chip."""

    flops: Mapping[str, float]  # FLOP/s dense, by format of the multiplication: "bf16", "fp8", "fp4", "int8"
    hbm_bytes_per_s: float
    link_bytes_per_s: float = 0.0  # to the other chips of the node, one direction
    family: str = "hopper"  # a key of FAMILIES
    sms: int = 0  # multiprocessors; 0: from the peak and the family

    def peak(self, dtype: str) -> float:
        """FLOP/s in this format; formats the chip cannot multiply run at its bf16 rate, after conversion."""
        return self.flops.get(dtype) or self.flops["bf16"]


@dataclass(frozen=True, slots=True)
class Host:
    """Time that is no kernel's: launching work and answering people, seconds."""

    layer_s: float = 32e-6  # per layer and step: launches and gaps between kernels
    step_s: float = 0.13e-3  # per step: batch preparation, sampling, the loop itself
    row_s: float = 4e-6  # per request and step
    request_s: float = 16e-3  # per request, once: HTTP, tokenisation, first stream chunk


@dataclass(frozen=True, slots=True)
class Family:
    """Constants shared by the chips of one generation."""

    flops_per_sm: float  # bf16 FLOP/s of one multiprocessor at its boost clock
    tiles: tuple[tuple[int, int, float], ...]  # output tile (m, n) and the share of peak its inner loop reaches
    weight_share: float = 0.80  # share of HBM bandwidth that a large stream of weights reaches
    stream_share: float = 0.85
    floor_s: float = 4e-6  # an empty kernel, as the GPU sees it
    latency_s: float = 2.5e-6  # of a memory pipeline before it is full
    decode_floor_s: float = 12e-6
    decode_share: float = 0.85
    decode_inflight_s: float = 20e-6
    prefill_floor_s: float = 12e-6
    prefill_share: float = 0.60
    prefill_half: float = 400.0  # length at which causal prefill attention reaches half of its share
    reduce_floor_s: float = 5e-6
    link_share: float = 0.75
    host: Host = field(default_factory=Host)


_TILES = ((64, 64, 0.60), (128, 64, 0.72), (64, 128, 0.72), (128, 128, 0.85), (128, 256, 0.95), (256, 128, 0.95))

FAMILIES: dict[str, Family] = {
    "ampere": Family(312e12 / 108, _TILES, weight_share=0.72, floor_s=4.3e-6, decode_floor_s=15e-6, decode_share=0.80),
    "ada": Family(165e12 / 128, _TILES, weight_share=0.88, decode_share=0.85),
    "hopper": Family(989e12 / 132, _TILES, weight_share=0.87, floor_s=3.3e-6, decode_share=0.92),
    "blackwell": Family(2250e12 / 148, _TILES, weight_share=0.85, floor_s=3.3e-6, decode_share=0.90),
    "generic": Family(312e12 / 108, _TILES),
}


class Efficiency:
    """The analytic source of kernel times for one chip."""

    def __init__(self, silicon: Silicon, family: Family | None = None) -> None:
        self.silicon = silicon
        self.family = family or FAMILIES.get(silicon.family, FAMILIES["generic"])
        self.host = self.family.host
        self.sms = silicon.sms or max(1, round(silicon.peak("bf16") / self.family.flops_per_sm))
        self.gemm = lru_cache(maxsize=1 << 16)(self._gemm)

    def _gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", weight_bytes: float = 2.0) -> KernelTime:
        """Tiles of the output come in waves over the multiprocessors; weights stream from memory meanwhile."""
        compute_s = self._tiled_s(m, n, k, self.silicon.peak(dtype))
        moved = weight_bytes * n * k + 2.0 * m * (n + k)
        memory_s = self.family.latency_s + moved / (self.silicon.hbm_bytes_per_s * self.family.weight_share)
        return _slower(self.family.floor_s, compute_s, memory_s)

    def _tiled_s(self, m: int, n: int, k: int, peak: float) -> float:
        """The best tile for this shape: whole waves of tiles, a multiprocessor each."""
        per_sm = peak / self.sms
        best = math.inf
        for tile_m, tile_n, share in self.family.tiles:
            tiles = -(-m // tile_m) * -(-n // tile_n)
            best = min(best, -(-tiles // self.sms) * 2.0 * tile_m * tile_n * k / (per_sm * share))
        return best

    def experts(
        self,
        tokens: int,
        hidden: int,
        inter: int,
        experts: int,
        topk: int,
        *,
        ep: int = 1,
        dtype: str = "bf16",
        weight_bytes: float = 2.0,
        matrices: int = 3,
    ) -> KernelTime:
        """Weights of every expert that a token of the batch chose are read; each expert pads its tokens to a tile."""
        local = experts / ep
        hit = experts_hit(tokens, experts, topk) / ep
        pairs = tokens * topk / ep
        rows = max(1.0, pairs / max(hit, 1e-9))
        padded = hit * (-(-rows // 16)) * 16
        flops = 2.0 * matrices * padded * hidden * inter
        share = 0.6 * rows / (rows + 64)
        compute_s = flops / (self.silicon.peak(dtype) * max(share, 0.05))
        moved = min(hit, local) * matrices * hidden * inter * weight_bytes + 2.0 * pairs * 2 * (hidden + inter)
        memory_s = moved / (self.silicon.hbm_bytes_per_s * self.family.weight_share)
        return _slower(3 * self.family.floor_s, compute_s, memory_s)

    def decode_attention(
        self,
        rows: int,
        context: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int = 128,
        kv_bytes: float = 2.0,
        latent: bool = False,
    ) -> KernelTime:
        """KV is read once; too little of it keeps too few bytes in flight to fill the memory system."""
        family, peak = self.family, self.silicon.hbm_bytes_per_s
        moved = context * kv_heads * head_dim * kv_bytes * (1 if latent else 2)
        stream_s = moved / (peak * family.decode_share)
        ramp_s = family.decode_inflight_s * (1.0 - math.exp(-stream_s / family.decode_inflight_s))
        compute_s = 4.0 * context * heads * head_dim / (self.silicon.peak("bf16") * 0.5)
        return _slower(family.decode_floor_s, compute_s, stream_s + ramp_s)

    def prefill_attention(
        self, rows: int, tokens: int, pairs: int, *, heads: int, kv_heads: int, head_dim: int = 128
    ) -> KernelTime:
        """Causal tiles: the share of peak grows with the number of keys a query sees."""
        if not tokens:
            return KernelTime(0.0, "latency")
        family = self.family
        keys = 2.0 * pairs / tokens
        share = family.prefill_share * keys / (keys + family.prefill_half)
        return _slower(
            family.prefill_floor_s, 4.0 * pairs * heads * head_dim / (self.silicon.peak("bf16") * share), 0.0
        )

    def allreduce(self, nbytes: float, gpus: int) -> KernelTime:
        """A ring moves 2 (g - 1) / g of the bytes over each link."""
        if gpus <= 1 or not nbytes:
            return KernelTime(0.0, "link")
        wire = 2.0 * (gpus - 1) / gpus * nbytes
        link = self.silicon.link_bytes_per_s * self.family.link_share
        return KernelTime(self.family.reduce_floor_s + wire / link, "link")

    def stream(self, nbytes: float) -> KernelTime:
        return _slower(self.family.floor_s, 0.0, nbytes / (self.silicon.hbm_bytes_per_s * self.family.stream_share))


def experts_hit(tokens: int, experts: int, topk: int) -> float:
    """Expected number of experts that at least one of `tokens` picks, each picking `topk` of `experts` evenly."""
    return experts * (1.0 - (1.0 - topk / experts) ** tokens)


def _slower(floor_s: float, compute_s: float, memory_s: float) -> KernelTime:
    """Floor plus the slower side, named after what binds."""
    slower = max(compute_s, memory_s)
    bound = "latency" if floor_s > slower else "compute" if compute_s > memory_s else "memory"
    return KernelTime(floor_s + slower, bound)
