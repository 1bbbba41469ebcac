"""How do latency and throughput grow with the batch, and where is the knee?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Chart, Column, Expected, Line, Mark, Table, solve
from paceline.plan.case import MOST_BATCH, Case
from paceline.plan.formula import Formula
from paceline.plan.ideal import CAPACITY, COMPUTE, DECODE_STEP, KV, READING, WEIGHTS, batches, best_batch
from paceline.plan.units import Unit, digits, show


def ask(case: Case) -> Answer:
    held = case.kv_read()
    roof, fits = case.roofline, case.sequences_that_fit(case.traffic.context)
    knee = solve(
        "knee_batch",
        "knee",
        Unit.COUNT,
        "min(weights / kv_per_sequence, weights * peak / (2 * active * bandwidth))"
        if roof.knows_compute
        else "weights / kv_per_sequence",
        **case.amounts,
    )
    at_knee = max(1, round(knee.value))
    found = best_batch(case.step_s, MOST_BATCH) if case.knows_times else None
    if found is not None:
        knee = knee.expecting(Expected.exactly(found))
    limit = solve(
        "throughput_limit",
        "throughput with any batch",
        Unit.TOKENS_PER_S,
        "1 / (kv_per_sequence / bandwidth + 2 * active / peak)"
        if roof.knows_compute
        else "bandwidth / kv_per_sequence",
        **case.amounts,
    )
    right = KV if knee.value == roof.weights / held else COMPUTE
    beyond = "" if fits >= at_knee else f" Memory ends it sooner: {fits:,} sequences fit."
    return Answer(
        name="curve",
        question="How do latency and throughput grow with the batch?",
        headline=f"The knee is at {digits(knee.value, 3)} sequences: up to it a step is mostly {WEIGHTS}, shared by "
        f"more and more tokens; past it mostly {right}, which grows with each sequence.{beyond}",
        values=(knee, limit),
        binds=f"{WEIGHTS} below {at_knee}, {right} above" + (f", {CAPACITY} at {fits:,}" if fits < MOST_BATCH else ""),
        tables=(_table(case, held, fits),),
        charts=(_chart(case, held, at_knee, found, fits),),
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
    formula = Formula(DECODE_STEP if case.roofline.knows_compute else READING)
    changing = ("batch", "weights") if case.model.experts else ("batch",)  # more tokens meet more experts
    numbers = {name: case.amounts[name] for name in formula.names if name not in changing}
    return Table("curve", columns, tuple(rows), formula, numbers)


def _chart(case: Case, held: float, knee: int, found: int | None, fits: int) -> Chart:
    most = min(MOST_BATCH, max(4 * knee, 2 * (found or 1), 64, min(fits, 16 * knee)))
    grid = batches(most)

    def on_paper(batch: int) -> tuple[float, float]:
        step_s = case.roofline.decode_s(batch, held)
        return step_s, batch / step_s

    def in_truth(batch: int) -> tuple[float, float]:
        step_s = case.step_s(batch)
        return step_s, batch / step_s

    lines = [Line("ideal", tuple(map(on_paper, grid)), "s1 dash")]
    if found is not None:
        lines.append(Line("expected", tuple(map(in_truth, grid)), "s2"))
        lines.append(_knee(found, in_truth(found), "s2"))
    lines.append(_knee(knee, on_paper(knee), "s1"))
    powers = [batch for batch in grid if batch & (batch - 1) == 0]
    told = in_truth if found is not None else on_paper
    titles = tuple(f"batch {batch}: {show(told(batch)[0], Unit.SECONDS)} a step" for batch in powers)
    style = "s2" if found is not None else "s1"
    lines.append(Line("batch 1, 2, 4, ...", tuple(map(told, powers)), style, dots=True, titles=titles))
    marks = [Mark("x", case.targets.itl_s, f"ITL target {show(case.targets.itl_s, Unit.SECONDS)}")]
    if fits and fits <= most:
        marks.append(Mark("x", case.step_s(fits), f"memory full, {fits} sequences"))
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


def _knee(batch: int, at: tuple[float, float], style: str) -> Line:
    label = f"knee, {batch}"
    return Line("", (at,), style, dots=True, titles=(label,), label=label)
