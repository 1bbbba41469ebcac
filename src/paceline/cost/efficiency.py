"""How long one GPU kernel takes: what the datasheet allows, and the mechanisms that keep kernels below it.

    Efficiency(Silicon({"bf16": 989e12}, 3.35e12, 450e9, "hopper")).gemm(64, 4096, 4096).seconds

Every curve (`curves/`) is a handful of constants with a physical meaning: a launch floor, a share of the peak, tiles
that come in waves, pieces that keep enough of memory busy. So it carries over to a chip nobody has measured: the
datasheet's peaks go in, the family's constants (`families.py`) stay. `docs/efficiency.md` explains each constant and
gives its error against measured kernels. `tables.py` answers the same questions from measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from paceline.cost.curves.experts import touched_evenly
from paceline.cost.curves.timing import KernelTime, slower
from paceline.cost.families import FAMILIES, Family
from paceline.cost.host import HOSTS, Host

__all__ = ["FAMILIES", "HOSTS", "Efficiency", "Family", "Host", "KernelTime", "Kernels", "Silicon"]


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
        """An element-wise kernel (norm, activation, rotary) that moves `nbytes`."""
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


class Efficiency:
    """The analytic source of kernel times for one chip."""

    def __init__(self, silicon: Silicon, family: Family | None = None) -> None:
        self.silicon = silicon
        self.family = family or FAMILIES.get(silicon.family, FAMILIES["generic"])
        self.host = self.family.host
        self.sms = silicon.sms or max(1, round(silicon.peak("bf16") / self.family.flops_per_sm))
        self.gemm = lru_cache(maxsize=1 << 16)(self._gemm)

    def _gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", weight_bytes: float = 2.0) -> KernelTime:
        silicon = self.silicon
        return self.family.gemm.time(
            m,
            n,
            k,
            peak=silicon.peak(dtype),
            bandwidth=silicon.hbm_bytes_per_s,
            sms=self.sms,
            dtype=dtype if dtype in silicon.flops else "bf16",
            weight_bytes=weight_bytes,
        )

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
        """Tokens choose their experts evenly and independently."""
        choices = tokens * topk
        touched = touched_evenly(tokens, experts, topk) / ep
        return self.family.experts.time(
            choices / ep,
            touched,
            choices,
            hidden=hidden,
            inter=inter,
            matrices=matrices,
            weight_bytes=weight_bytes,
            peak=self.silicon.peak(dtype),
            bandwidth=self.silicon.hbm_bytes_per_s,
            strength=self.silicon.peak("bf16") / self.sms / self.family.flops_per_sm,
        )

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
        """KV is read once, by as many multiprocessors as the kernel finds work for."""
        return self.family.decode.time(
            rows,
            context,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            kv_bytes=kv_bytes,
            latent=latent,
            peak=self.silicon.peak("bf16"),
            bandwidth=self.silicon.hbm_bytes_per_s,
            sms=self.sms,
        )

    def prefill_attention(
        self, rows: int, tokens: int, pairs: int, *, heads: int, kv_heads: int, head_dim: int = 128
    ) -> KernelTime:
        """Causal tiles in waves; new keys and values are written, too."""
        return self.family.prefill.time(
            rows,
            tokens,
            pairs,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            peak=self.silicon.peak("bf16"),
            bandwidth=self.silicon.hbm_bytes_per_s,
            sms=self.sms,
        )

    def allreduce(self, nbytes: float, gpus: int) -> KernelTime:
        """By the quickest algorithm that a server would use."""
        return self.family.reduce.time(nbytes, gpus, link=self.silicon.link_bytes_per_s)

    def stream(self, nbytes: float) -> KernelTime:
        """Memory traffic after a launch."""
        family = self.family
        return slower(family.stream_floor_s, 0.0, nbytes / (self.silicon.hbm_bytes_per_s * family.stream_share))
