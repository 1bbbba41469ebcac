"""How do latency and throughput grow with the batch, and where is the knee?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Chart, Column, Line, Mark, Table, solve
from paceline.plan.case import MOST_BATCH, Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.ideal import CAPACITY, COMPUTE, DECODE_STEP, KV, WEIGHTS, batches, best_batch
from paceline.plan.units import Unit, digits, show


def ask(case: Case) -> Answer:
    held = case.kv_read()
    roof, fits = case.roofline, case.sequences_that_fit(case.traffic.context)
    knee = solve(
        "knee_batch",
        "knee, ideal",
        Unit.COUNT,
        "min(weights / kv_per_sequence, weights * peak / (2 * active * bandwidth))"
        if roof.knows_compute
        else "weights / kv_per_sequence",
        **case.amounts,
    )
    at_knee = max(1, round(knee.value))
    values = [knee]
    if roof.knows_compute:
        found = best_batch(case.step_s, MOST_BATCH)
        values.append(solve("knee_expected", "knee, expected", Unit.COUNT, "best", best=Amount(found, Unit.COUNT)))
    limit = solve(
        "throughput_limit",
        "throughput with any batch",
        Unit.TOKENS_PER_S,
        "1 / (kv_per_sequence / bandwidth + 2 * active / peak)",
        **case.amounts,
    )
    right = KV if knee.value == roof.weights / held else COMPUTE
    values.append(limit)
    beyond = "" if fits >= at_knee else f" Memory ends it sooner: {fits:,} sequences fit."
    return Answer(
        name="curve",
        question="How do latency and throughput grow with the batch?",
        headline=f"The knee is at {digits(knee.value, 3)} sequences: up to it a step is mostly {WEIGHTS}, shared by "
        f"more and more tokens; past it mostly {right}, which grows with each sequence.{beyond}",
        values=tuple(values),
        binds=f"{WEIGHTS} below {at_knee}, {right} above" + (f", {CAPACITY} at {fits:,}" if fits < MOST_BATCH else ""),
        tables=(_table(case, held, fits),),
        charts=(_chart(case, held, at_knee, fits),),
        notes=(
            "the knee is where throughput divided by latency is greatest (Kleinrock's power): half of the throughput "
            "there is, at about twice the step of one stream",
        ),
    )


def _table(case: Case, held: float, fits: int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for batch in [2**power for power in range(11) if 2**power <= MOST_BATCH]:
        ideal_s = case.roofline.decode_s(batch, held)
        step_s = case.step_s(batch)
        binds = CAPACITY if batch > fits else case.roofline.decode_binds(batch, held)
        rows.append(
            (
                batch,
                ideal_s,
                step_s,
                1.0 / step_s,
                batch / ideal_s,
                batch / step_s,
                binds,
            )
        )
    columns = (
        Column("batch", "batch"),
        Column("step_s", "step", Unit.SECONDS),
        Column("expected_step_s", "expected", Unit.SECONDS),
        Column("per_user", "each user gets", Unit.TOKENS_PER_S),
        Column("throughput", "total", Unit.TOKENS_PER_S),
        Column("expected_throughput", "expected", Unit.TOKENS_PER_S),
        Column("binds", "what binds"),
    )
    numbers = {name: case.amounts[name] for name in Formula(DECODE_STEP).names if name != "batch"}
    return Table("curve", columns, tuple(rows), Formula(DECODE_STEP), numbers)


def _chart(case: Case, held: float, knee: int, fits: int) -> Chart:
    most = min(MOST_BATCH, max(4 * knee, 64, min(fits, 16 * knee)))
    grid = batches(most)
    ideal = tuple((case.roofline.decode_s(batch, held), batch / case.roofline.decode_s(batch, held)) for batch in grid)
    lines = [Line("ideal", ideal, "s1 dash")]
    found = [(case.step_s(batch), batch) for batch in grid]
    lines.append(
        Line(
            "expected" if case.roofline.knows_compute else "the same by batch",
            tuple((step_s, batch / step_s) for step_s, batch in found),
            "s2",
        )
    )
    dots = [(step_s, batch) for step_s, batch in found if batch & (batch - 1) == 0]
    lines.append(
        Line(
            "batch 1, 2, 4, ...",
            tuple((step_s, batch / step_s) for step_s, batch in dots),
            "s2",
            dots=True,
            titles=tuple(f"batch {batch}: {show(step_s, Unit.SECONDS)} a step" for step_s, batch in dots),
        )
    )
    marks = [Mark("x", case.roofline.decode_s(knee, held), f"knee, {knee} sequences")]
    if fits and fits <= most:
        marks.append(Mark("x", case.step_s(fits), f"memory full, {fits} sequences"))
    marks.append(Mark("x", case.targets.itl_s, f"ITL target {show(case.targets.itl_s, Unit.SECONDS)}"))
    return Chart(
        caption="Latency against throughput",
        reading="Each point is a batch; to the left of the knee more users are nearly free, to the right each of them "
        "makes all others slower.",
        x_label="time of a step",
        y_label="tokens/s in all",
        lines=tuple(lines),
        marks=tuple(marks),
        x_unit=Unit.SECONDS,
    )
