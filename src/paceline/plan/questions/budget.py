"""How many tokens of prompts may a step carry, so that those who decode get their next token in time?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Chart, Column, Expected, Line, Mark, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.ideal import COMPUTE, KV, WEIGHTS
from paceline.plan.search import largest
from paceline.plan.units import Unit, show

BUDGET = "floor(max(0, (itl - batch * kv_per_sequence / bandwidth) * peak / (2 * active) - batch))"
VENDORS = ((512, "Sarathi-Serve"), (2048, "vLLM"), (8192, "SGLang"))
BATCHES = (1, 8, 16, 32, 64, 128, 256)
MOST = 1 << 17


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known."""
    if not case.roofline.knows_compute:
        return None
    ideal, found = ideal_budget(case, case.traffic.batch), expected_budget(case, case.traffic.batch)
    values: list[Value] = [ideal.expecting(Expected.exactly(found))]
    itl = show(case.targets.itl_s, Unit.SECONDS)
    if found:
        steps = -(-case.traffic.prompt // found)
        last = case.step_s(case.traffic.batch, found)
        values.append(
            solve(
                "prompt_through_budget_s",
                f"a prompt of {case.traffic.prompt:,} through it",
                Unit.SECONDS,
                "ceil(prompt / budget) * step",
                prompt=case.amounts["prompt"],
                budget=_tokens(found),
                step=Amount(last, Unit.SECONDS),
            )
        )
        headline = (
            f"Beside {case.traffic.batch} decoding sequences a step of {itl} has room for {found:,} prompt tokens "
            f"({ideal.value:,.0f} on paper): a prompt of {case.traffic.prompt:,} takes {steps} "
            f"step{'s' if steps > 1 else ''}."
        )
    else:
        alone = show(case.step_s(case.traffic.batch), Unit.SECONDS)
        headline = (
            f"None: {case.traffic.batch} sequences alone take {alone} a step and {itl} are promised. Fewer of them, "
            "shorter ones, more chips, or a slower promise."
        )
    return Answer(
        name="budget",
        question="What token budget does the ITL target allow?",
        headline=headline,
        values=tuple(values),
        binds=_binds(case),
        tables=(_by_batch(case), _vendors(case)),
        charts=(_chart(case, found),),
        notes=("a fixed budget is right for one batch and one context only; `slo` finds it anew each step",),
    )


def ideal_budget(case: Case, batch: int) -> Value:
    """On the roofline, from the seconds that reading KV leaves; 0 where reading the weights alone takes longer.

    How many experts a chunk reads depends on the chunk: there it is searched for.
    """
    put_in = dict(case.amounts)
    put_in["batch"] = Amount(batch, Unit.COUNT)
    if case.model.experts is not None:
        kv_s = batch * case.kv_read() / case.roofline.bandwidth
        found = largest(lambda chunk: kv_s + case.roofline.prefill_s(batch + chunk) <= case.targets.itl_s, MOST)
        return solve("token_budget", "prompt tokens a step", Unit.TOKENS, "n", n=_tokens(found))
    in_time = case.roofline.decode_s(batch, case.kv_read()) <= case.targets.itl_s
    return solve("token_budget", "prompt tokens a step", Unit.TOKENS, BUDGET if in_time else "0", **put_in)


def expected_budget(case: Case, batch: int, most: int = MOST) -> int:
    """Most prompt tokens beside `batch` decodes whose step is expected within the target; 0: not even the decodes."""
    return largest(lambda chunk: case.step_s(batch, chunk) <= case.targets.itl_s, most)


def _binds(case: Case) -> str:
    held = case.kv_read()
    kv_s = case.traffic.batch * held / case.roofline.bandwidth
    if case.roofline.decode_s(case.traffic.batch, held) > case.targets.itl_s:
        return WEIGHTS if kv_s < case.roofline.weights / case.roofline.bandwidth else KV
    return COMPUTE


def _by_batch(case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for batch in BATCHES:
        found = expected_budget(case, batch)
        rate = found / case.step_s(batch, found) if found else 0.0
        rows.append((batch, ideal_budget(case, batch).value, found, rate))
    columns = (
        Column("batch", "decoding"),
        Column("ideal", "budget, ideal", Unit.TOKENS),
        Column("expected", "budget, expected", Unit.TOKENS),
        Column("prefill_rate", "prompts get", Unit.TOKENS_PER_S),
    )
    return Table("budget_by_batch", columns, tuple(rows))


def _vendors(case: Case) -> Table:
    batch = case.traffic.batch
    rows: list[tuple[Cell, ...]] = []
    for budget, who in VENDORS:
        step_s = case.step_s(batch, max(1, budget - batch))
        rows.append((who, budget, step_s, "kept" if step_s <= case.targets.itl_s else "broken"))
    columns = (
        Column("default", "default of"),
        Column("budget", "tokens a step", Unit.TOKENS),
        Column("step_s", "full step, expected", Unit.SECONDS),
        Column("promise", "the promise is"),
    )
    return Table("vendor_budgets", columns, tuple(rows))


def _chart(case: Case, found: int) -> Chart:
    most = max(2048, 4 * found)
    grid = [most * part // 32 for part in range(33)]
    lines = tuple(
        Line(f"{batch} decoding", tuple((chunk, case.step_s(batch, chunk)) for chunk in grid), f"s{at + 1}")
        for at, batch in enumerate(sorted({1, case.traffic.batch, 8 * case.traffic.batch}))
    )
    target = case.targets.itl_s
    return Chart(
        caption="What a chunk of a prompt costs those who decode",
        reading="The step's time, which is everybody's gap between tokens, by the prompt tokens it carries.",
        x_label="prompt tokens in the step",
        y_label="time of the step",
        lines=lines,
        marks=(
            Mark("y", target, f"ITL target {show(target, Unit.SECONDS)}"),
            *((Mark("x", found, f"budget, {found:,}"),) if found else ()),
        ),
        y_unit=Unit.SECONDS,
        x_log=False,
        y_log=False,
    )


def _tokens(count: float) -> Amount:
    return Amount(count, Unit.TOKENS)
