"""What does a million tokens cost?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Column, Table, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.search import largest
from paceline.plan.units import Unit, show

PER_MILLION = "price * chips / 3600 / tokens_per_s * 1000000"
_per_million = Formula(PER_MILLION)


def ask(case: Case) -> Answer | None:
    """None where no price is given, or no sequence fits."""
    if case.price_per_hour is None or not case.sequences_that_fit(case.traffic.context):
        return None
    price = Amount(case.price_per_hour, Unit.PRICE)
    batch = min(case.traffic.batch, case.sequences_that_fit(case.traffic.context))
    best = best_in_time(case)
    values = [
        solve(
            "output_price",
            f"output tokens at batch {batch}",
            Unit.MONEY,
            PER_MILLION,
            price=price,
            chips=case.amounts["chips"],
            tokens_per_s=Amount(batch / case.step_s(batch), Unit.TOKENS_PER_S),
        )
    ]
    if best:
        values.append(
            solve(
                "output_price_in_time",
                f"output tokens at batch {best}, the largest within the ITL target",
                Unit.MONEY,
                PER_MILLION,
                price=price,
                chips=case.amounts["chips"],
                tokens_per_s=Amount(best / case.step_s(best), Unit.TOKENS_PER_S),
            )
        )
    if case.roofline.knows_compute:
        values.append(
            solve(
                "input_price",
                "input tokens",
                Unit.MONEY,
                PER_MILLION,
                price=price,
                chips=case.amounts["chips"],
                tokens_per_s=Amount(case.traffic.prompt / case.prompt_s(case.traffic.prompt), Unit.TOKENS_PER_S),
            )
        )
    told = values[1] if best else values[0]
    return Answer(
        name="cost",
        question="What does a million tokens cost?",
        headline=f"{money(told.value)} a million output tokens "
        + (f"at batch {best}, within {show(case.targets.itl_s, Unit.SECONDS)} a token." if best else f"at {batch}."),
        values=tuple(values),
        binds="the batch: the chip costs the same whatever it carries",
        tables=(_table(case),),
        notes=("a chip that is always busy; divide by the share of the day that it is",),
    )


def best_in_time(case: Case) -> int:
    """The most sequences that fit and decode within the ITL target; 0: none."""
    fits = case.sequences_that_fit(case.traffic.context)
    return largest(lambda batch: case.step_s(batch) <= case.targets.itl_s, fits)


def money(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def _table(case: Case) -> Table:
    assert case.price_per_hour is not None
    held, fits = case.kv_read(), case.sequences_that_fit(case.traffic.context)
    rows: list[tuple[Cell, ...]] = []
    for batch in sorted({2**power for power in range(10) if 2**power < fits} | {min(fits, 512)}):
        prices = (
            _per_million(price=case.price_per_hour, chips=case.chips, tokens_per_s=batch / step_s)
            for step_s in (case.roofline.decode_s(batch, held) / case.deployment.pp, case.step_s(batch))
        )
        rows.append((batch, case.step_s(batch), *prices))
    columns = (
        Column("batch", "batch"),
        Column("step_s", "time between tokens", Unit.SECONDS),
        Column("ideal", "a million, ideal", Unit.MONEY),
        Column("expected", "a million, expected", Unit.MONEY),
    )
    numbers = {"price": Amount(case.price_per_hour, Unit.PRICE), "chips": case.amounts["chips"]}
    return Table("cost_by_batch", columns, tuple(rows), Formula(PER_MILLION), numbers)
