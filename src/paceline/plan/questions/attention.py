"""Is attention bound by memory or by compute: naive and fused, in prefill and in decode?

One layer, one sequence. Naive attention writes the scores to memory, reads and writes them again in the softmax and
reads them for the values; fused attention (FlashAttention) keeps them on the chip. Naive prefill also computes the half
of the square that causality throws away.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.answer import Answer, Cell, Chart, Column, Line, Mark, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.ideal import COMPUTE
from paceline.plan.units import Unit, digits

MEMORY = "memory"
BYTES_NAIVE = (
    "activation * query_numbers * queries + kv_bytes * kv_numbers * keys + 4 * activation * heads * queries * keys"
)
BYTES_FUSED = "activation * query_numbers * queries + kv_bytes * kv_numbers * keys"
OPERATIONS = "pair * pairs"


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    label: str
    naive: bool
    prefill: bool


KINDS = (
    Kind("naive_prefill", "naive, prefill", True, True),
    Kind("fused_prefill", "fused, prefill", False, True),
    Kind("naive_decode", "naive, decode", True, False),
    Kind("fused_decode", "fused, decode", False, False),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved and operations done by one layer for one sequence."""

    kind: Kind
    nbytes: Value
    operations: Value
    intensity: Value


def ask(case: Case) -> Answer:
    works = [work_of(case, kind) for kind in KINDS]
    ridge = case.roofline.ridge
    values = [value for work in works for value in (work.nbytes, work.operations, work.intensity)]
    ratio = None
    if case.roofline.knows_compute:
        ratio = solve("chip_ratio", "the chip's ratio", Unit.INTENSITY, "peak / bandwidth", **case.amounts)
        values.insert(0, ratio)
    decode, prefill = works[3].intensity.value, works[1].intensity.value
    against = f"the chip's ratio is {digits(ridge, 3)}" if ratio else "the chip's ratio is not known"
    return Answer(
        name="attention",
        question="Is attention bound by memory or by compute?",
        headline=f"Fused, {digits(decode, 3)} FLOP a byte in decode and {digits(prefill, 3)} in a prefill of "
        f"{case.traffic.prompt:,}; {against}. Batching does not help a decode: each sequence reads its own KV.",
        values=tuple(values),
        binds=f"decode: {binds(decode, ridge)}, prefill: {binds(prefill, ridge)}",
        tables=(_table(works, ridge, case),),
        charts=(_chart(case, works),) if ratio else (),
        notes=(
            "one layer, one sequence; a fused kernel is counted as reading each key and value once",
            *(("decode works on the latent vector itself (absorbed projections)",) if case.model.latent else ()),
        ),
    )


def binds(intensity: float, ridge: float) -> str:
    return COMPUTE if intensity >= ridge else MEMORY


def work_of(case: Case, kind: Kind) -> Work:
    """The work of one kind at the traffic's prompt or context."""
    queries = case.traffic.prompt if kind.prefill else 1
    keys = case.traffic.prompt if kind.prefill else case.traffic.context
    causal = kind.prefill and not kind.naive
    put_in = {
        **_sizes(case, kind),
        "queries": Amount(queries, Unit.COUNT),
        "keys": Amount(keys, Unit.COUNT),
        "pairs": Amount(queries * (queries + 1) / 2 if causal else queries * keys, Unit.COUNT),
        "heads": Amount(case.model.heads, Unit.COUNT),
        "activation": Amount(2.0, Unit.COUNT),
        "kv_bytes": Amount(case.deployment.kv_precision.bytes, Unit.COUNT),
    }
    text = BYTES_NAIVE if kind.naive else BYTES_FUSED
    nbytes = solve(f"{kind.name}_bytes", f"{kind.label}: bytes", Unit.BYTES, text, **put_in)
    operations = solve(f"{kind.name}_flops", f"{kind.label}: operations", Unit.OPERATIONS, OPERATIONS, **put_in)
    intensity = solve(
        f"{kind.name}_intensity",
        f"{kind.label}: intensity",
        Unit.INTENSITY,
        "operations / bytes_moved",
        operations=operations,
        bytes_moved=nbytes,
    )
    return Work(kind, nbytes, operations, intensity.bound_by(binds(intensity.value, case.roofline.ridge)))


def _sizes(case: Case, kind: Kind) -> dict[str, Amount]:
    """Numbers of a query with its output, of a key with its value, and FLOPs of a pair, over all heads of a layer."""
    model, latent = case.model, case.model.latent
    if latent is None:
        query, pair = 2 * model.heads * model.head_dim, 4 * model.heads * model.head_dim
        kept = 2 * model.kv_heads * model.head_dim
    elif kind.prefill:  # keys and values of every head are made from the latent vector
        per_head = latent.nope_dim + latent.rope_dim + latent.value_dim
        query = kept = model.heads * per_head
        pair = 2 * model.heads * per_head
    else:
        query = model.heads * (2 * latent.kv_rank + latent.rope_dim)
        pair = 2 * model.heads * (2 * latent.kv_rank + latent.rope_dim)
        kept = latent.kv_rank + latent.rope_dim
    return {
        "query_numbers": Amount(query, Unit.COUNT),
        "kv_numbers": Amount(kept, Unit.COUNT),
        "pair": Amount(pair, Unit.COUNT),
    }


def _table(works: list[Work], ridge: float, case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for work in works:
        reachable = min(case.roofline.peak, work.intensity.value * case.roofline.bandwidth)
        rows.append(
            (
                work.kind.label,
                work.nbytes.value,
                work.operations.value,
                work.intensity.value,
                reachable if case.roofline.knows_compute else None,
                binds(work.intensity.value, ridge),
            )
        )
    columns = (
        Column("kind", "attention"),
        Column("bytes", "bytes", Unit.BYTES),
        Column("flops", "operations", Unit.OPERATIONS),
        Column("intensity", "intensity", Unit.INTENSITY),
        Column("reachable", "at most", Unit.OPERATIONS_PER_S),
        Column("binds", "what binds"),
    )
    return Table("attention", columns, tuple(rows), Formula("operations / bytes"), {})


def _chart(case: Case, works: list[Work]) -> Chart:
    """The roofline: what attention and the weights reach under it."""
    roof, bytes_each = case.roofline, case.deployment.precision.bytes
    points = [(work.intensity.value, work.kind.label) for work in works]
    for tokens in (1, case.traffic.batch, case.traffic.prompt):
        intensity = 2.0 * roof.active * tokens / roof.read(tokens)
        points.append((intensity, f"weights, {tokens:,} token{'s' if tokens > 1 else ''}"))
    low = min(intensity for intensity, _ in points) / 2.0
    high = max(*(intensity for intensity, _ in points), roof.ridge) * 4.0
    slope = ((low, low * roof.bandwidth), (roof.ridge, roof.peak), (high, roof.peak))
    lines = [Line(f"{case.chip.title}, {case.format}", slope, "s1")]
    for at, (intensity, name) in enumerate(points):
        reached = min(roof.peak, intensity * roof.bandwidth)
        weights = at >= len(works)
        style, legend = ("s6", "") if weights else (f"s{2 + at}", name)
        point = ((intensity, reached),)
        lines.append(Line(legend, point, style, dots=True, titles=(name,), label=name, above=weights))
    return Chart(
        caption="Roofline",
        reading="Left of the ridge memory decides and the multipliers wait; right of it compute decides. "
        f"Weights at {digits(bytes_each, 3)} bytes a parameter.",
        x_label="FLOP for each byte read or written",
        y_label="FLOP/s",
        lines=tuple(lines),
        marks=(Mark("x", roof.ridge, f"ridge, {digits(roof.ridge, 3)}"),),
        y_unit=Unit.OPERATIONS_PER_S,
    )
