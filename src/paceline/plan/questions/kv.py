"""How many bytes of KV cache does a token take?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Column, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.units import Unit, digits, show

LENGTHS = (1024, 4096, 8192, 32768, 131072)


def ask(case: Case) -> Answer:
    context = case.traffic.context
    per_token, per_sequence = per_token_of(case), per_sequence_of(case)
    model = case.model
    notes = []
    if model.window_layers:
        notes.append(
            f"{model.window_layers} of {model.layers} layers look back {model.window:,} tokens only: a sequence longer "
            "than that takes less than its tokens times the bytes of one"
        )
    if case.kv_copies > 1.0:
        notes.append(
            f"tensor parallel cannot split it {case.deployment.tp} ways: the chips keep, and read, "
            f"{digits(case.kv_copies, 3)} copies of it"
        )
    return Answer(
        name="kv",
        question="How many bytes of KV cache does a token take?",
        headline=f"{show(per_token.value, Unit.BINARY)} a token, {show(per_sequence.value, Unit.BINARY)} for "
        f"{context:,} tokens.",
        values=(per_token, per_sequence),
        tables=(_by_length(case),),
        notes=tuple(notes),
    )


def per_token_of(case: Case) -> Value:
    """Over all layers and all chips of a replica."""
    model = case.model
    numbers = {
        "layers": Amount(model.layers, Unit.COUNT),
        "bytes_each": Amount(case.deployment.kv_precision.bytes, Unit.COUNT),
    }
    if model.latent is not None:
        formula = "layers * (latent + rope) * bytes_each"
        numbers["latent"] = Amount(model.latent.kv_rank, Unit.COUNT)
        numbers["rope"] = Amount(model.latent.rope_dim, Unit.COUNT)
    else:
        formula = "2 * layers * kv_heads * head_dim * bytes_each"
        numbers["kv_heads"] = Amount(model.kv_heads, Unit.COUNT)
        numbers["head_dim"] = Amount(model.head_dim, Unit.COUNT)
    return solve("kv_bytes_per_token", "KV of one token", Unit.BINARY, formula, **numbers)


def per_sequence_of(case: Case) -> Value:
    """One sequence at the traffic's context."""
    model, context = case.model, case.traffic.context
    name, label = "kv_bytes_per_sequence", f"KV of a sequence of {context:,}"
    if not model.window_layers:
        formula = "context * kv_per_token"
        return solve(name, label, Unit.BINARY, formula, **case.amounts)
    return solve(
        name,
        label,
        Unit.BINARY,
        "(full_layers * context + window_layers * min(context, window)) / layers * kv_per_token",
        full_layers=Amount(model.full_layers, Unit.COUNT),
        window_layers=Amount(model.window_layers, Unit.COUNT),
        layers=Amount(model.layers, Unit.COUNT),
        window=Amount(model.window, Unit.COUNT),
        context=case.amounts["context"],
        kv_per_token=case.amounts["kv_per_token"],
    )


def _by_length(case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (length, case.kv_per_sequence(length), case.sequences_that_fit(length)) for length in LENGTHS
    ]
    columns = (
        Column("context", "context", Unit.TOKENS),
        Column("kv_bytes", "KV of one sequence", Unit.BINARY),
        Column("fit", "sequences that fit"),
    )
    return Table("kv_by_context", columns, tuple(rows))
