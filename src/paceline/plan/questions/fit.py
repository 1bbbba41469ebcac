"""Does it fit: weights, KV and reserve, on these chips? If not, what would?"""

from __future__ import annotations

from paceline.cost.deployment import Deployment
from paceline.plan.answer import Answer, Cell, Column, Expected, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.ideal import CAPACITY
from paceline.plan.units import Unit, show


def ask(case: Case) -> Answer:
    memory, context = case.memory, case.traffic.context
    fits = case.sequences_that_fit(context)
    weights, needed, chips = rule_of_thumb(case)
    pool = _pool(case)
    block = Amount(memory.block_bytes, Unit.BINARY)
    blocks = solve(
        "blocks",
        f"blocks of {memory.block_size} tokens",
        Unit.COUNT,
        "max(0, floor(pool / block))",
        pool=pool,
        block=block,
    )
    sequences = solve("sequences", f"sequences of {context:,}", Unit.COUNT, "fit", fit=Amount(fits, Unit.COUNT))
    others = [] if fits else alternatives(case)
    rule = (
        f"Rule of thumb: weights x {case.pool.factor:g} is {show(needed.value, Unit.BYTES)}, "
        f"{chips.value:.0f} {case.chip.name}"
    )
    return Answer(
        name="fit",
        question="Does it fit?",
        headline=f"{_verdict(case, fits, others)} {rule}.",
        values=(weights, pool, blocks, sequences, needed, chips),
        binds=_binds(case, fits),
        tables=(_budget(case), *((_alternatives(case, others),) if others else ())),
        notes=("the blocks that an engine reports in its log are the truth; what it had in use goes into `--used-gb`",),
    )


def rule_of_thumb(case: Case) -> tuple[Value, Value, Value]:
    """Weights, what to plan with for them, and how many chips have that: the next power of two, as nodes come."""
    exact = case.deployment.weights_bytes
    put_in = dict(case.amounts)
    put_in["factor"] = Amount(case.pool.factor, Unit.COUNT)
    put_in["memory"] = Amount(case.chip.memory_gb * 1e9, Unit.BYTES)
    weights = solve(
        "weights_bytes",
        "weights",
        Unit.BYTES,
        "given" if case.weights_bytes else "params * bytes_per_param",
        given=Amount(case.weights_bytes or 0.0, Unit.BYTES),
        **put_in,
    ).expecting(Expected(exact, exact, exact))
    put_in["weights"] = weights.amount
    needed = solve("rule_of_thumb_bytes", "to plan with", Unit.BYTES, "weights * factor", **put_in)
    chips = solve(
        "rule_of_thumb_chips", "chips for that", Unit.COUNT, "power_of_two(needed / memory)", needed=needed, **put_in
    )
    return weights, needed, chips


def _pool(case: Case) -> Value:
    """Memory for KV on the fullest chip."""
    memory = case.memory
    return solve(
        "kv_pool_bytes",
        "KV pool, on the fullest chip",
        Unit.BYTES,
        "utilization * memory - weights - activations - runtime",
        utilization=Amount(memory.utilization, Unit.COUNT),
        memory=Amount(memory.total_bytes, Unit.BYTES),
        weights=Amount(memory.weights_bytes, Unit.BYTES),
        activations=Amount(memory.activation_bytes, Unit.BYTES),
        runtime=Amount(memory.runtime_bytes, Unit.BYTES),
    )


def alternatives(case: Case) -> list[Deployment]:
    """Layouts of this model on these chips that hold a sequence, the fewest chips for each precision."""
    return case.deployment.alternatives(case.traffic.context, utilization=case.pool.utilization)


def _verdict(case: Case, fits: int, others: list[Deployment]) -> str:
    layout, context = case.deployment.layout, case.traffic.context
    if fits:
        return f"Yes: {layout} has room for {fits:,} sequences of {context:,} tokens."
    memory = case.memory
    missing = (
        f"{show(-memory.kv_bytes, Unit.BYTES)} a chip are missing"
        if memory.kv_bytes < 0.0
        else f"{memory.tokens:,} tokens of KV fit and one sequence has {context:,}"
    )
    would = "; or ".join(other.layout for other in others) or "no layout of up to 16 nodes: take a larger chip"
    return f"No: {layout} does not hold one sequence of {context:,} tokens, {missing}. What would: {would}."


def _binds(case: Case, fits: int) -> str:
    if case.memory.kv_bytes <= 0.0:
        return "memory for the weights"
    return CAPACITY if not fits else f"{CAPACITY}, past {fits:,} sequences"


def _budget(case: Case) -> Table:
    memory = case.memory
    rest = memory.total_bytes * (1.0 - memory.utilization)
    parts = (
        ("weights", memory.weights_bytes),
        ("activations of the largest step", memory.activation_bytes),
        ("runtime, graphs, collectives", memory.runtime_bytes),
        ("KV" if memory.kv_bytes >= 0.0 else "missing", abs(memory.kv_bytes)),
        ("left alone", rest),
    )
    rows: list[tuple[Cell, ...]] = [(name, nbytes, nbytes / memory.total_bytes) for name, nbytes in parts]
    columns = (
        Column("part", "one chip's memory"),
        Column("bytes", "bytes", Unit.BYTES),
        Column("share", "share", Unit.SHARE),
    )
    return Table("budget", columns, tuple(rows))


def _alternatives(case: Case, others: list[Deployment]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for other in others:
        memory = other.memory(block_size=case.pool.block_size, utilization=case.pool.utilization)
        rows.append((other.layout, other.chips, memory.kv_bytes, memory.tokens))
    columns = (
        Column("layout", "what would"),
        Column("chips", "chips"),
        Column("kv_bytes", "KV on a chip", Unit.BYTES),
        Column("tokens", "tokens of KV", Unit.TOKENS),
    )
    return Table("alternatives", columns, tuple(rows))
