"""When does speculative decoding pay: by batch and acceptance?

A step that verifies k drafts of B sequences computes B x (k + 1) tokens. While weights are being read anyway they are
nearly free; past the critical batch each of them costs as much as a token, and rejected ones are waste.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.shape import StepShape
from paceline.plan.answer import Answer, Cell, Chart, Column, Line, Mark, Table, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.search import largest
from paceline.plan.units import Unit, digits, show

ACCEPTED = "(1 - acceptance**(drafted + 1)) / (1 - acceptance)"
SPEEDUP = "tokens_per_step * step / (verify + drafted * draft_cost * step)"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ACCEPTANCES = (0.5, 0.7, 0.9)

_accepted, _speedup = Formula(ACCEPTED), Formula(SPEEDUP)


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known: what a verified token costs is compute."""
    if not case.roofline.knows_compute:
        return None
    drafting, batch = case.drafting, case.traffic.batch
    acceptance, drafted = Amount(drafting.acceptance, Unit.COUNT), Amount(drafting.drafted, Unit.COUNT)
    tokens = solve(
        "tokens_per_step",
        "tokens a step for each sequence",
        Unit.TOKENS,
        ACCEPTED,
        acceptance=acceptance,
        drafted=drafted,
    )
    gain = solve(
        "speedup",
        f"speed-up at batch {batch}, expected",
        Unit.FACTOR,
        SPEEDUP,
        tokens_per_step=tokens,
        drafted=drafted,
        draft_cost=Amount(draft_cost(case), Unit.COUNT),
        step=Amount(case.step_s(batch), Unit.SECONDS),
        verify=Amount(verify_s(case, batch), Unit.SECONDS),
    )
    even = break_even(case, batch)
    limit = next((one for one in BATCHES if speedup(case, one, drafting.acceptance) < 1.0), None)
    until = f"It stops paying at a batch of about {limit:,}." if limit else "It pays at every batch up to 512."
    return Answer(
        name="speculation",
        question="When does speculative decoding pay?",
        headline=f"With {drafting.drafted} drafts of which {show(drafting.acceptance, Unit.SHARE)} hold, "
        f"{show(gain.value, Unit.FACTOR)} at batch {batch}. {until} "
        + (f"Break-even acceptance at batch {batch}: {show(even, Unit.SHARE)}." if even is not None else ""),
        values=(tokens, gain),
        binds="reading the weights, which verifies for free, below the critical batch; compute above it",
        tables=(_table(case),),
        charts=(_chart(case),),
        notes=(
            f"a draft costs {digits(draft_cost(case), 3)} of a step"
            + (" (one layer and the head, as EAGLE's)" if drafting.cost is None else ""),
            "the longer the contexts, the longer it pays: the KV of a sequence is read once for all its drafts",
            "acceptance is the chance of each draft given that those before it held; measured ones fall with position",
        ),
    )


def draft_cost(case: Case) -> float:
    """Time of one draft as a share of a decode step: given, or the weights of one layer and the head over all."""
    if case.drafting.cost is not None:
        return case.drafting.cost
    model = case.model
    layer = (model.multiplied_params - model.embedding_params) / model.layers
    return (layer + model.embedding_params) / model.multiplied_params


def verify_s(case: Case, batch: int, drafted: int | None = None, *, ideal: bool = False) -> float:
    """A step that verifies the drafts of `batch` sequences."""
    count = (case.drafting.drafted if drafted is None else drafted) + 1
    context, roof = case.traffic.context, case.roofline
    if ideal:
        kv_s = batch * case.kv_read(context) / roof.bandwidth
        return kv_s + max(2.0 * roof.active * batch * count / roof.peak, roof.read(batch * count) / roof.bandwidth)
    one = StepShape().plus(context - 1, count)
    return case.cost.predict(StepShape(batch * count, batch, batch * one.context, batch * one.pairs)).seconds


def speedup(case: Case, batch: int, acceptance: float, *, ideal: bool = False) -> float:
    """Tokens a second with speculation over those without."""
    held = case.kv_read()
    return _speedup(
        tokens_per_step=_accepted(acceptance=acceptance, drafted=case.drafting.drafted),
        step=case.roofline.decode_s(batch, held) if ideal else case.step_s(batch),
        verify=verify_s(case, batch, ideal=ideal),
        drafted=case.drafting.drafted,
        draft_cost=draft_cost(case),
    )


def break_even(case: Case, batch: int, *, ideal: bool = False) -> float | None:
    """The acceptance from which speculation pays at this batch; None: not even one close to 1."""
    return _least(lambda acceptance: speedup(case, batch, acceptance, ideal=ideal) >= 1.0)


def _least(holds: Callable[[float], bool]) -> float | None:
    """The least acceptance for which it holds, to a thousandth, where it holds for all greater ones."""
    if not holds(0.999):
        return None
    return 0.0 if holds(0.0) else (1 + largest(lambda mills: not holds(mills / 1000.0), 998)) / 1000.0


def _table(case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            batch,
            break_even(case, batch, ideal=True),
            break_even(case, batch),
            *(speedup(case, batch, acceptance) for acceptance in ACCEPTANCES),
        )
        for batch in BATCHES
    ]
    columns = (
        Column("batch", "batch"),
        Column("break_even_ideal", "break-even, ideal", Unit.SHARE),
        Column("break_even", "break-even, expected", Unit.SHARE),
        *(
            Column(f"speedup_{100 * acceptance:.0f}", f"at {100 * acceptance:.0f} %", Unit.FACTOR)
            for acceptance in ACCEPTANCES
        ),
    )
    return Table("speculation", columns, tuple(rows), Formula(SPEEDUP), {})


def _chart(case: Case) -> Chart:
    lines = tuple(
        Line(
            f"{100 * acceptance:.0f} % accepted",
            tuple((batch, speedup(case, batch, acceptance)) for batch in BATCHES),
            f"s{at + 1}",
        )
        for at, acceptance in enumerate(ACCEPTANCES)
    )
    return Chart(
        caption="Speculation by batch",
        reading=f"Speed-up with {case.drafting.drafted} drafts a step. Below 1 it makes everybody slower.",
        x_label="sequences that decode",
        y_label="speed-up",
        lines=lines,
        marks=(Mark("y", 1.0, "break-even"),),
        y_unit=Unit.COUNT,
        y_log=False,
    )
