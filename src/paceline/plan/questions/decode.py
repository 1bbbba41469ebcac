"""How fast can one stream decode, and what do more users cost it?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Value, solve
from paceline.plan.case import Case, rate
from paceline.plan.formula import Amount
from paceline.plan.ideal import COMPUTE, DECODE_STEP, READING, WEIGHTS
from paceline.plan.units import Unit, show


def ask(case: Case) -> Answer:
    one, many = step_of(case, 1, "step_one"), step_of(case, case.traffic.batch, "step_batch")
    read, compute, ceiling = ceiling_of(case)
    total = solve(
        "throughput_batch",
        f"total of {case.traffic.batch}",
        Unit.TOKENS_PER_S,
        "batch / step_batch",
        batch=case.amounts["batch"],
        step_batch=many,
    ).expecting(rate(case.traffic.batch, case.decode(case.traffic.batch)))
    gain = solve(
        "throughput_gain",
        f"{case.traffic.batch} streams against one",
        Unit.FACTOR,
        "batch * step_one / step_batch",
        batch=case.amounts["batch"],
        step_one=one,
        step_batch=many,
    )
    return Answer(
        name="decode",
        question="How fast can one stream decode?",
        headline=f"At most {show(ceiling.value, Unit.TOKENS_PER_S)}: every token reads all the weights once. With "
        f"{case.traffic.context:,} tokens of context a step takes {show(one.value, Unit.SECONDS)} for one user and "
        f"{show(many.value, Unit.SECONDS)} for {case.traffic.batch}, {show(gain.value, Unit.FACTOR)} the throughput.",
        values=(read, *((compute,) if compute else ()), ceiling, one, many, total, gain),
        binds=COMPUTE if compute and compute.value > read.value else WEIGHTS,
        notes=_notes(case),
    )


def ceiling_of(case: Case) -> tuple[Value, Value | None, Value]:
    """Reading the weights, multiplying with them (None: the chip's rate is unknown), and the ceiling they set."""
    put_in = dict(case.amounts)
    put_in["weights"] = Amount(case.roofline.read(1), Unit.BYTES)
    read = solve("weights_read_s", "reading the weights", Unit.SECONDS, "weights / bandwidth", **put_in)
    compute = None
    if case.roofline.knows_compute:
        compute = solve("compute_s", "multiplying with them", Unit.SECONDS, "2 * active / peak", **put_in)
    ceiling = solve(
        "decode_ceiling",
        "ceiling of one stream",
        Unit.TOKENS_PER_S,
        "1 / max(weights_read, compute)" if compute else "1 / weights_read",
        weights_read=read,
        **({"compute": compute} if compute else {}),
    )
    return read, compute, ceiling.expecting(rate(1.0, case.decode(1, 1))).bound_by(WEIGHTS)


def step_of(case: Case, batch: int, name: str) -> Value:
    """A decode step of `batch` sequences at the traffic's context."""
    put_in = dict(case.amounts)
    put_in["batch"] = Amount(batch, Unit.COUNT)
    put_in["weights"] = Amount(case.roofline.read(batch), Unit.BYTES)
    binds = case.roofline.decode_binds(batch, case.kv_read())
    formula = DECODE_STEP if case.roofline.knows_compute else READING
    step = solve(name, f"a step of {batch}", Unit.SECONDS, formula, **put_in)
    return step.expecting(case.decode(batch)).bound_by(binds)


def _notes(case: Case) -> tuple[str, ...]:
    if case.roofline.knows_compute:
        return ()
    expected = "" if case.knows_times else ", and nothing is expected beyond the ideal"
    return (
        f"the maker of {case.chip.name} publishes no rate of {case.format}: compute is left out{expected}; measure a "
        "rate and add it to a chip of your own",
    )
