"""Measured kernels as a source of times, in place of efficiency curves.

    kernels = KernelTables(Efficiency(silicon)).read(Path("kernels"), "h100_sxm")
    AnalyticCost(deployment, kernels).predict(shape)

A table is never as dense as what it is asked for, and kernels step where tiles and waves do. So what is interpolated,
on logarithmic axes, is not the time but its ratio to the curve's: at a measured point the answer is the measurement,
between points it follows the curve's steps, and beyond the last point it is the curve, scaled as at the edge. Then, and
where nothing of the kind was measured, the answer says that it is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from paceline.cost.curves.timing import KernelTime
from paceline.cost.efficiency import Kernels
from paceline.cost.grid import Grid
from paceline.cost.table_files import Row, read_kind, read_linear

EVEN = ("balanced", "power_law_1.01")  # distributions over experts, the first that a file has
WIDE = {1.0: "fp8", 2.0: "bf16"}  # formats by bytes of a number
Point = tuple[float, ...]


class _Experts(NamedTuple):
    """What a measurement of experts was of."""

    dtype: str
    tokens: int
    hidden: int
    inter: int  # here
    experts: int
    topk: int
    ep: int

    @classmethod
    def of(cls, row: Row) -> _Experts:
        return cls(
            row.dtype("moe_dtype"),
            row.number("num_tokens"),
            row.number("hidden_size"),
            row.number("inter_size") // row.number("moe_tp_size"),
            row.number("num_experts"),
            row.number("topk"),
            row.number("moe_ep_size"),
        )


class KernelTables:
    """Implements `Kernels` by what was measured on one chip; `curves` shape what lies between and beyond."""

    def __init__(self, curves: Kernels) -> None:
        self.curves = curves
        self._rows: dict[tuple[object, ...], list[tuple[Point, float]]] = defaultdict(list)
        self._grids: dict[tuple[object, ...], Grid] = {}
        self.gemm = lru_cache(maxsize=1 << 16)(self._gemm)

    # Reading.

    def read(self, folder: Path, prefix: str) -> KernelTables:
        """Take in every file of a folder that begins with `prefix`; itself. ConfigError names a malformed line."""
        for row in read_kind(folder, prefix, "gemm"):
            self.add_gemm(row.number("m"), row.number("n"), row.number("k"), row.seconds, row.dtype("gemm_dtype"))
        for row in read_kind(folder, prefix, "generation_attention"):
            self._add_decode(row)
        for row in read_kind(folder, prefix, "context_attention"):
            if row.dtype("kv_cache_dtype") == "bf16":
                self._add_prefill(row)
        self._add_experts(read_kind(folder, prefix, "moe"))
        self._add_reduces(folder, prefix)
        return self

    def read_linear(self, path: Path) -> KernelTables:
        """Take in the linear layers of one model, measured by tokens and tensor-parallel degree; itself."""
        for m, n, k, seconds in read_linear(path):
            self.add_gemm(m, n, k, seconds)
        return self

    def add_gemm(self, m: int, n: int, k: int, seconds: float, dtype: str = "bf16") -> None:
        """One measured multiply."""
        size = 2.0 if dtype == "bf16" else 1.0
        curve = self.curves.gemm(m, n, k, dtype=dtype.removesuffix("_block"), weight_bytes=size)
        self._add(("gemm", dtype), (n, k, m), seconds, curve)

    def _add_decode(self, row: Row) -> None:
        rows, length = row.number("batch_size"), row.number("step") + 1  # the query's own key comes on top
        heads, kv_heads, dtype = row.number("num_heads"), row.number("num_key_value_heads"), row.dtype("kv_cache_dtype")
        dim = row.number("head_dim")
        size = 1.0 if dtype == "fp8" else 2.0
        curve = self.curves.decode_attention(
            rows, rows * length, heads=heads, kv_heads=kv_heads, head_dim=dim, kv_bytes=size
        )
        self._add(("decode", dtype, dim), (kv_heads, heads, rows, length), row.seconds, curve)

    def _add_prefill(self, row: Row) -> None:
        rows, length = row.number("batch_size"), row.number("isl")
        heads, kv_heads, dim = row.number("num_heads"), row.number("num_key_value_heads"), row.number("head_dim")
        pairs = rows * length * (length + 1) // 2
        curve = self.curves.prefill_attention(rows, rows * length, pairs, heads=heads, kv_heads=kv_heads, head_dim=dim)
        self._add(("prefill", dim), (kv_heads, heads, rows, length), row.seconds, curve)

    def _add_experts(self, rows: Iterable[Row]) -> None:
        """Of several kernels and distributions for a shape, the quickest of the most even."""
        found: dict[_Experts, dict[str, float]] = defaultdict(dict)
        for row in rows:
            times = found[_Experts.of(row)]
            name = row.columns.get("distribution", EVEN[0])
            times[name] = min(row.seconds, times.get(name, math.inf))
        for shape, times in found.items():
            if shape.dtype not in WIDE.values():
                continue
            seconds = next((times[name] for name in EVEN if name in times), min(times.values()))
            curve = self.curves.experts(
                shape.tokens,
                shape.hidden,
                shape.inter,
                shape.experts,
                shape.topk,
                ep=shape.ep,
                dtype=shape.dtype,
                weight_bytes=2.0 if shape.dtype == "bf16" else 1.0,
            )
            self._add(("experts", shape.dtype, *shape[2:]), (shape.tokens,), seconds, curve)

    def _add_reduces(self, folder: Path, prefix: str) -> None:
        """The quickest way to sum each message."""
        best: dict[tuple[int, float], float] = {}
        for kind, dtype in (("custom_allreduce", "allreduce_dtype"), ("nccl", "nccl_dtype")):
            for row in read_kind(folder, prefix, kind):
                if row.dtype(dtype) != "bf16" or "all_reduce" not in row.columns.get("op_name", "all_reduce"):
                    continue
                key = row.number("num_gpus"), 2.0 * row.number("message_size")
                best[key] = min(row.seconds, best.get(key, math.inf))
        for (gpus, nbytes), seconds in best.items():
            self._add(("reduce",), (gpus, nbytes), seconds, self.curves.allreduce(nbytes, gpus))

    def _add(self, table: tuple[object, ...], point: Point, seconds: float, curve: KernelTime) -> None:
        self._rows[table].append((point, math.log(seconds / curve.seconds)))
        self._grids.pop(table, None)
        self.gemm.cache_clear()

    # Answering.

    def _gemm(self, m: int, n: int, k: int, *, dtype: str = "bf16", weight_bytes: float = 2.0) -> KernelTime:
        curve = self.curves.gemm(m, n, k, dtype=dtype, weight_bytes=weight_bytes)
        if weight_bytes not in WIDE or (dtype == "bf16") != (weight_bytes == 2.0):
            return curve._replace(known=False)  # weights that are widened on their way in
        return self._scaled(("gemm", dtype), (n, k, m), curve)

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
        """Measured shapes alone: between two models nothing is interpolated."""
        curve = self.curves.experts(
            tokens,
            hidden,
            inter,
            experts,
            topk,
            ep=ep,
            dtype=dtype,
            weight_bytes=weight_bytes,
            matrices=matrices,
        )
        return self._scaled(("experts", dtype, hidden, inter, experts, topk, ep), (tokens,), curve)

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
        """Rows are taken to be equally long."""
        curve = self.curves.decode_attention(
            rows, context, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_bytes=kv_bytes, latent=latent
        )
        if latent or kv_bytes not in WIDE or rows <= 0 or context <= 0:
            return curve._replace(known=False)
        return self._scaled(("decode", WIDE[kv_bytes], head_dim), (kv_heads, heads, rows, context / rows), curve)

    def prefill_attention(
        self, rows: int, tokens: int, pairs: int, *, heads: int, kv_heads: int, head_dim: int = 128
    ) -> KernelTime:
        """Keys that a row finds in the cache count as the curve counts them."""
        curve = self.curves.prefill_attention(rows, tokens, pairs, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        if rows <= 0 or tokens <= 0:
            return curve
        return self._scaled(("prefill", head_dim), (kv_heads, heads, rows, tokens / rows), curve)

    def allreduce(self, nbytes: float, gpus: int) -> KernelTime:
        """The quickest measured way."""
        curve = self.curves.allreduce(nbytes, gpus)
        return self._scaled(("reduce",), (gpus, nbytes), curve) if curve.seconds > 0.0 else curve

    def stream(self, nbytes: float) -> KernelTime:
        """Not measured: the curve's."""
        return self.curves.stream(nbytes)

    def _scaled(self, table: tuple[object, ...], point: Point, curve: KernelTime) -> KernelTime:
        """The curve's time by the ratio read from the table."""
        grid = self._grids.get(table)
        if grid is None:
            grid = self._grids[table] = Grid(self._rows.get(table, ()))
        ratio = grid.at(point)
        return curve._replace(seconds=curve.seconds * math.exp(ratio.value), known=curve.known and ratio.inside)
