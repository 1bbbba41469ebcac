"""Where does the time of a step go, and how much of the chip does it use?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.shape import StepShape
from paceline.cost.operation import Operation
from paceline.plan.answer import Answer, Cell, Chart, Column, Line, Mark, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.units import Unit, digits, show

BOUNDS = {
    "memory": "memory",
    "compute": "compute",
    "latency": "floors of small kernels",
    "link": "the link",
    "host": "launches and the host",
}


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known."""
    if not case.roofline.knows_compute:
        return None
    batch, prompt = case.traffic.batch, case.traffic.prompt
    decode = case.analytic.operations(StepShape(batch, batch, batch * case.traffic.context))
    prefill = case.analytic.operations(StepShape().plus(0, prompt))
    mbu, mfu = bandwidth_use(case), compute_use(case)
    notes = ["the operations of the chip with the most to do, all calls of a kind together"]
    if case.measured is not None:
        notes.append("the shares in use are those of the measured server, the operations those of datasheets")
    return Answer(
        name="operations",
        question="Where does the time of a step go?",
        headline=f"A decode step of {batch} spends {_largest(decode)} and uses {show(mbu.value, Unit.SHARE)} of the "
        f"memory bandwidth; a prompt of {prompt:,} spends {_largest(prefill)} and uses {show(mfu.value, Unit.SHARE)} "
        "of the arithmetic.",
        values=(mbu, mfu),
        binds=f"decode: {_binds(decode)}; prefill: {_binds(prefill)}",
        tables=(
            _table("decode_operations", f"decode of {batch}", decode),
            _table("prefill_operations", f"prompt of {prompt:,}", prefill),
        ),
        charts=(_chart(case, decode, prefill),),
        notes=tuple(notes),
    )


def bandwidth_use(case: Case) -> Value:
    """Bytes that a decode step has to read over those that memory could have read meanwhile (MBU)."""
    batch = case.traffic.batch
    put_in = dict(case.amounts)
    put_in["weights"] = Amount(case.roofline.read(batch), Unit.BYTES)
    put_in["step"] = Amount(case.step_s(batch), Unit.SECONDS)
    text = "(weights + batch * kv_per_sequence) / (step * bandwidth)"
    return solve("decode_mbu", f"memory bandwidth in use, decode of {batch} (MBU)", Unit.SHARE, text, **put_in)


def compute_use(case: Case) -> Value:
    """FLOP that a prompt needs over those that the chip could have done meanwhile (MFU)."""
    prompt = case.traffic.prompt
    put_in = dict(case.amounts)
    put_in["attention"] = Amount(case.attention_flops(prompt), Unit.OPERATIONS)
    put_in["prefill"] = Amount(case.prompt_s(prompt), Unit.SECONDS)
    text = "(2 * active * prompt + attention) / (prefill * peak)"
    return solve("prefill_mfu", f"arithmetic in use, prompt of {prompt:,} (MFU)", Unit.SHARE, text, **put_in)


def _total_s(operations: Sequence[Operation]) -> float:
    return sum(one.seconds for one in operations)


def _largest(operations: Sequence[Operation]) -> str:
    """The largest operation and its share."""
    one = max(operations, key=lambda one: one.seconds)
    return f"{show(one.seconds / _total_s(operations), Unit.SHARE)} in {one.name}"


def _binds(operations: Sequence[Operation]) -> str:
    """Shares of the time by what bounds it, the largest first; those below 3 % are left out."""
    total_s = _total_s(operations)
    shares = {bound: sum(one.seconds for one in operations if one.bound == bound) / total_s for bound in BOUNDS}
    told = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{BOUNDS[bound]} {show(share, Unit.SHARE)}" for bound, share in told if share >= 0.03)


def _table(name: str, label: str, operations: Sequence[Operation]) -> Table:
    total_s = _total_s(operations)
    rows: list[tuple[Cell, ...]] = [
        (
            one.name,
            one.calls,
            one.flops or None,
            one.bytes or None,
            one.intensity or None,
            one.seconds,
            one.seconds / total_s,
            one.bound,
        )
        for one in operations
    ]
    columns = (
        Column("operation", label),
        Column("calls", "calls"),
        Column("flops", "operations", Unit.OPERATIONS),
        Column("bytes", "bytes", Unit.BYTES),
        Column("intensity", "intensity", Unit.INTENSITY),
        Column("seconds", "time", Unit.SECONDS),
        Column("share", "share", Unit.SHARE),
        Column("binds", "what binds"),
    )
    return Table(name, columns, tuple(rows))


def _chart(case: Case, decode: Sequence[Operation], prefill: Sequence[Operation]) -> Chart:
    """One chip's roofline and what its kernels reach below it."""
    peak, bandwidth = case.peak, case.chip.bandwidth
    found = [(one.intensity, one.flops / one.seconds) for one in (*decode, *prefill) if one.flops and one.bytes]
    low, high = min(at for at, _ in found) / 2.0, max(peak / bandwidth, *(at for at, _ in found)) * 2.0
    lines = [Line("datasheet", ((low, low * bandwidth), (peak / bandwidth, peak), (high, peak)), "s1")]
    for name, operations, style in (("decode", decode, "s5"), ("prefill", prefill, "s2")):
        shown = [one for one in operations if one.flops and one.bytes]
        points = tuple((one.intensity, one.flops / one.seconds) for one in shown)
        titles = tuple(f"{one.name}: {show(one.seconds, Unit.SECONDS)}, {one.bound}" for one in shown)
        lines.append(Line(f"{name}, expected", points, style, dots=True, titles=titles))
    return Chart(
        caption="What kernels reach below the roof",
        reading="Each dot is a kind of operation, named on hovering; its distance from the roof is what it loses.",
        x_label="FLOP for each byte read or written",
        y_label="FLOP/s",
        lines=tuple(lines),
        marks=(Mark("x", peak / bandwidth, f"ridge, {digits(peak / bandwidth, 3)}"),),
        y_unit=Unit.OPERATIONS_PER_S,
    )
