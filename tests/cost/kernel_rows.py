"""Measured kernels as rows of (arguments of a curve's `time`, seconds), and how the measuring was set up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paceline.cost.curves.fitting import errors_of, fit_curve
from paceline.cost.efficiency import Efficiency, Silicon
from paceline.cost.table_files import read_kind, read_linear

DATA = Path(__file__).parents[3] / "shared" / "data"
KERNELS = DATA / "kernels"
needs_tables = pytest.mark.skipif(not KERNELS.is_dir(), reason="no measured kernels beside the checkout")

CHIPS = {
    "a100": Silicon({"bf16": 312e12}, 2.039e12, 300e9, "ampere", 108),
    "h100": Silicon({"bf16": 989e12, "fp8": 1979e12}, 3.35e12, 450e9, "hopper", 132),
}
Curve = TypeVar("Curve")
MOST = 3000  # rows that a fit or a judgement looks at: the whole tables take minutes and say the same

# Widths that vLLM ships a tuned tile for, as (experts here, width here): its files are called
# fused_moe/configs/E=8,N=3584,device_name=NVIDIA_H100_80GB_HBM3.json and so on. All others run with a default tile.
TUNED = {
    ("a100", "bf16"): {
        (1, 14336),
        (8, 1792),
        (8, 2048),
        (8, 3584),
        (8, 4096),
        (8, 7168),
        (16, 2688),
        (128, 192),
    },
    ("h100", "bf16"): {
        (8, 1792),
        (8, 2048),
        (8, 3584),
        (8, 4096),
        (8, 7168),
        (16, 2688),
        (128, 192),
        (128, 928),
        (128, 1856),
        (256, 512),
    },
}


@dataclass(frozen=True)
class Measured:
    """Calls of one kind of kernel, in two halves: one to fit on, one to judge by."""

    calls: list[dict[str, Any]]
    seconds: list[float]

    def half(self, which: int) -> Measured:
        """Rows at random, the same in every run; `which` is 0 or 1."""
        order = list(range(len(self.calls)))
        random.Random(0).shuffle(order)
        chosen = order[which::2][:MOST]
        return Measured([self.calls[i] for i in chosen], [self.seconds[i] for i in chosen])

    def predict(self, time: Callable[..., Any]) -> list[float]:
        """Seconds of a curve for every call."""
        return [time(**call).seconds for call in self.calls]

    def judge(self, time: Callable[..., Any]) -> tuple[float, float]:
        """(median, p95) error of a curve."""
        return errors_of(self.predict(time), self.seconds)


def fitted(
    curve: Curve, names: Sequence[str], measured: Measured, time: Callable[[Curve], Callable[..., Any]]
) -> Curve:
    """The curve with the named constants fitted on one half."""
    half = measured.half(0)
    return fit_curve(curve, names, lambda candidate: half.predict(time(candidate)), half.seconds)


def _gathered(rows: Iterator[tuple[dict[str, Any], float]]) -> Measured:
    calls, seconds = zip(*rows, strict=True)
    return Measured(list(calls), list(seconds))


@lru_cache
def gemms(chip: str, dtype: str) -> Measured:
    """Square and slim, from 1 to 8,192 rows."""

    def rows() -> Iterator[tuple[dict[str, Any], float]]:
        for row in read_kind(KERNELS, f"{chip}_sxm", "gemm"):
            if row.dtype("gemm_dtype") == dtype:
                yield {name: row.number(name) for name in "mnk"}, row.seconds

    return _gathered(rows())


@lru_cache
def linear_layers() -> Measured:
    """Llama-3-8B on an A100, another library version and another way of measuring."""
    path = DATA / "gpu_linear_ops_a100_llama3_8b.csv"
    return _gathered(({"m": m, "n": n, "k": k}, seconds) for m, n, k, seconds in read_linear(path))


@lru_cache
def decodes(chip: str) -> Measured:
    """Batches of 1 to 2,048 rows, contexts of 1 to 131,072."""

    def rows() -> Iterator[tuple[dict[str, Any], float]]:
        for row in read_kind(KERNELS, f"{chip}_sxm", "generation_attention"):
            if row.dtype("kv_cache_dtype") == "bf16":
                batch, length = row.number("batch_size"), row.number("step") + 1
                yield _heads(row) | {"rows": batch, "context": batch * length}, row.seconds

    return _gathered(rows())


@lru_cache
def prefills(chip: str) -> Measured:
    """Batches of 1 to 256 prompts of 16 to 16,384 tokens. Prompts of one token are decodes."""

    def rows() -> Iterator[tuple[dict[str, Any], float]]:
        for row in read_kind(KERNELS, f"{chip}_sxm", "context_attention"):
            batch, length = row.number("batch_size"), row.number("isl")
            if row.dtype("kv_cache_dtype") == "bf16" and length > 1:
                pairs = batch * length * (length + 1) // 2
                yield _heads(row) | {"rows": batch, "tokens": batch * length, "pairs": pairs}, row.seconds

    return _gathered(rows())


@lru_cache
def reduces(chip: str) -> Measured:
    """Sums over 2, 4 and 8 chips, inside a CUDA graph."""

    def rows() -> Iterator[tuple[dict[str, Any], float]]:
        for row in read_kind(KERNELS, f"{chip}_sxm", "custom_allreduce"):
            if row.columns["kernel_source"] == "vLLM_custom_graph":
                nbytes = 2.0 * row.number("message_size")
                yield {"nbytes": nbytes, "gpus": row.number("num_gpus")}, row.seconds

    return _gathered(rows())


@lru_cache
def experts(chip: str) -> Measured:
    """Eleven models, split over up to 256 chips; loads drawn as the measuring drew them."""

    def rows() -> Iterator[tuple[dict[str, Any], float]]:
        for row in read_kind(KERNELS, f"{chip}_sxm", "moe"):
            if row.dtype("moe_dtype") != "bf16":
                continue
            tokens, topk, count = row.number("num_tokens"), row.number("topk"), row.number("num_experts")
            ep, inter = row.number("moe_ep_size"), row.number("inter_size") // row.number("moe_tp_size")
            choices, touched = _rank_load(tokens, count, topk, ep, row.columns["distribution"])
            yield (
                {
                    "choices": choices,
                    "touched": touched,
                    "all_choices": tokens * topk,
                    "hidden": row.number("hidden_size"),
                    "inter": inter,
                    "tuned": (count // ep, inter) in TUNED[chip, "bf16"],
                },
                row.seconds,
            )

    return _gathered(rows())


def _heads(row: Any) -> dict[str, Any]:
    return {
        "heads": row.number("num_heads"),
        "kv_heads": row.number("num_key_value_heads"),
        "head_dim": row.number("head_dim"),
    }


@cache
def _rank_load(tokens: int, count: int, topk: int, ep: int, distribution: str) -> tuple[float, float]:
    """(choices, experts touched) of the busiest rank: the mean of two draws by the collector's recipe."""
    draws = [_draw(tokens, count, topk, ep, distribution, random.Random(seed)) for seed in range(2)]
    return sum(map(sum, draws)) / 2.0, sum(sum(load > 0 for load in draw) for draw in draws) / 2.0


def _draw(tokens: int, count: int, topk: int, ep: int, distribution: str, random_: random.Random) -> list[int]:
    """Tokens of each expert of the busiest rank.

    "balanced" deals choices out to the ranks in turn. "power_law_A" draws the popularity of each expert from a power
    law of exponent A, between 1 and 0.8 of the tokens, or 0.01 and 2 where choices are fewer than experts, rounds, and
    gives what rounding lost to the most popular.
    """
    total, here = tokens * topk, count // ep
    loads = [total // count] * count
    if distribution == "balanced":
        for i in range(total % count):
            loads[i % ep * here + i // ep] += 1
    else:
        loads = _power_law(tokens, total, count, float(distribution.rsplit("_", 1)[1]), random_)
    ranks = [loads[rank * here : (rank + 1) * here] for rank in range(ep)]
    return [min(load, tokens) for load in max(ranks, key=sum)]


def _power_law(tokens: int, total: int, count: int, exponent: float, random_: random.Random) -> list[int]:
    low, high = (1.0, 0.8 * tokens) if total > count else (0.01, 2.0)
    e = 1.0 - exponent
    drawn = [((high**e - low**e) * random_.random() + low**e) ** (1.0 / e) for _ in range(count)]
    loads = [round(value / sum(drawn) * total) for value in drawn]
    order = sorted(range(count), key=lambda i: -loads[i])
    missing, at = total - sum(loads), 0
    while missing:
        i = order[at % count]
        if missing > 0 or loads[i] > 0:
            loads[i] += 1 if missing > 0 else -1
            missing -= 1 if missing > 0 else -1
        at += 1
    return loads


def efficiency(chip: str) -> Efficiency:
    """Datasheet and family alone."""
    return Efficiency(CHIPS[chip])
