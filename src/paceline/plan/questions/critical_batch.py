"""From how many tokens a step on is the chip busy computing rather than reading weights?"""

from __future__ import annotations

from paceline.core.shape import StepShape
from paceline.plan.answer import Answer, Expected, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.ideal import COMPUTE
from paceline.plan.units import Unit, digits

MOST_TOKENS = 4096  # looked at


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known."""
    if not case.roofline.knows_compute:
        return None
    ratio = solve("chip_ratio", "the chip's ratio", Unit.INTENSITY, "peak / bandwidth", **case.amounts)
    weights_ratio = Amount(case.roofline.params / case.roofline.active, Unit.COUNT)
    is_sparse = case.model.experts is not None
    critical = solve(
        "critical_batch",
        "critical batch",
        Unit.TOKENS,
        "chip_ratio * bytes_per_param / 2" + (" * params / active" if is_sparse else ""),
        chip_ratio=ratio,
        **case.amounts,
    )
    turn = linear_turn(case) if case.measured is None else None
    if turn is not None:
        critical = critical.expecting(Expected.exactly(turn))
    notes = [
        "tokens a step, of decodes and prompts together: a chunk of a prompt counts with all its tokens",
        "attention is not in it: a sequence's KV is read for that sequence alone, whatever the batch",
    ]
    if is_sparse:
        notes.append(
            f"a token meets 1 of {digits(weights_ratio.value, 3)} parameters, a large batch reads them all: experts "
            "raise the critical batch by that factor"
        )
    return Answer(
        name="critical_batch",
        question="From how many tokens a step on does compute bind?",
        headline=f"From about {digits(critical.value, 3)} tokens a step on the weights are used as fast as they are "
        f"read ({case.format} on {case.chip.title}).",
        values=(ratio, critical),
        binds="reading the weights below it, compute above",
        notes=tuple(notes),
    )


def linear_turn(case: Case) -> int | None:
    """Tokens from which on kernels bound by compute take half of all multiplications; None: over 4,096."""
    for tokens in range(8, MOST_TOKENS + 1, 8):
        multiplied = [one for one in case.analytic.operations(StepShape(tokens, 1, 1)) if one.flops]
        computing_s = sum(one.seconds for one in multiplied if one.bound == COMPUTE)
        if computing_s >= 0.5 * sum(one.seconds for one in multiplied):
            return tokens
    return None
