"""How many KV blocks will an engine really make?

Engines share memory out by different rules, and the same 0.9 means different amounts. Their own report in the log is
the truth; these are their rules with the same bytes put in.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.answer import Answer, Cell, Column, Table, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.units import Unit, show

OF_FREE = "share * max(0, memory - used)"
OF_ALL = "max(0, share * memory - used)"


@dataclass(frozen=True, slots=True)
class Rule:
    """Of an engine: `formula` over what a chip has and what is used when the pool is made."""

    engine: str
    setting: str
    share: float  # its default
    formula: str


RULES = (
    Rule("Paceline", "kv_share", 0.9, OF_FREE),
    Rule("TensorRT-LLM", "free_gpu_memory_fraction", 0.9, OF_FREE),
    Rule("vLLM", "gpu_memory_utilization", 0.9, OF_ALL),
    Rule("SGLang", "mem_fraction_static", 0.88, OF_ALL),
)


def ask(case: Case) -> Answer:
    used = Amount(used_bytes(case), Unit.BYTES)
    share = Amount(case.pool.utilization, Unit.COUNT)
    memory = case.amounts["memory"]
    of_free = solve(
        "pool_of_free", "a share of what is free", Unit.BYTES, OF_FREE, share=share, memory=memory, used=used
    )
    of_all = solve("pool_of_all", "a share of all, less what is used", Unit.BYTES, OF_ALL, **of_free.numbers)
    per_block = case.memory.block_bytes
    blocks = solve(
        "blocks_of_free",
        f"blocks of {case.pool.block_size} tokens in it",
        Unit.COUNT,
        "floor(pool / block)",
        pool=of_free,
        block=Amount(per_block, Unit.BINARY),
    )
    return Answer(
        name="pool",
        question="How many KV blocks will an engine really make?",
        headline=f"With {show(used.value, Unit.BYTES)} of {memory} used on a chip, {show(share.value, Unit.SHARE)} of "
        f"the free memory is {show(of_free.value, Unit.BYTES)}, {blocks.value:,.0f} blocks; the same share of all "
        f"memory leaves {show(of_all.value, Unit.BYTES)}.",
        values=(of_free, of_all, blocks),
        binds="what is used before the pool is made: weights, activations of the largest step, graphs",
        tables=(_table(case, used.value, per_block),),
        notes=(
            "on one chip; where chips share the heads, a block spans them all",
            "a simulation should take the number from the engine's log, not from here",
        ),
    )


def used_bytes(case: Case) -> float:
    """On one chip before the pool is made: given, else weights and the reserve."""
    memory = case.memory
    return memory.weights_bytes + memory.activation_bytes + memory.runtime_bytes


def _table(case: Case, used: float, per_block: float) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rule in RULES:
        pool = max(0.0, Formula(rule.formula)(share=rule.share, memory=case.chip.memory_bytes, used=used))
        blocks = int(pool / per_block)
        rows.append((rule.engine, f"{rule.setting} = {rule.share:g}", pool, blocks, blocks * case.pool.block_size))
    columns = (
        Column("engine", "engine"),
        Column("setting", "default"),
        Column("bytes", "pool on a chip", Unit.BYTES),
        Column("blocks", "blocks"),
        Column("tokens", "tokens", Unit.TOKENS),
    )
    return Table("pools", columns, tuple(rows))
