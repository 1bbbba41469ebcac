"""How long does a prompt take?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Chart, Column, Expected, Line, Mark, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.ideal import COMPUTE, PREFILL, WEIGHTS
from paceline.plan.search import largest
from paceline.plan.units import Unit, show

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MOST_PROMPT = 1 << 20


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known: a prefill is compute."""
    if not case.roofline.knows_compute:
        return None
    prompt = time_of(case, case.traffic.prompt)
    per_s = solve(
        "prefill_rate", "prompt tokens a second, at most", Unit.TOKENS_PER_S, "peak / (2 * active)", **case.amounts
    )
    target_s = case.targets.ttft_s
    longest = largest(lambda n: case.roofline.prefill_s(n, case.attention_flops(n)) <= target_s, MOST_PROMPT)
    fit = solve(
        "longest_prompt",
        f"longest prompt within {show(target_s, Unit.SECONDS)}",
        Unit.TOKENS,
        "longest",
        longest=Amount(longest, Unit.TOKENS),
    ).expecting(Expected.exactly(largest(lambda n: case.prompt_s(n) <= target_s, MOST_PROMPT)))
    even = _attention_as_long(case)
    expected = f", {show(case.prompt_s(case.traffic.prompt), Unit.SECONDS)} expected"
    return Answer(
        name="prefill",
        question="How long does a prompt take?",
        headline=f"{case.traffic.prompt:,} tokens take {show(prompt.value, Unit.SECONDS)}{expected}; attention, which "
        f"grows with the square, takes as long as the weights from {even:,} tokens on."
        if even
        else f"{case.traffic.prompt:,} tokens take {show(prompt.value, Unit.SECONDS)}{expected}.",
        values=(prompt, per_s, fit),
        binds=prompt.binds,
        tables=(_table(case),),
        charts=(_chart(case),),
        notes=("one prompt alone on the chip, from an empty cache",),
    )


def time_of(case: Case, tokens: int, name: str = "prefill_s") -> Value:
    """A prompt of `tokens`, alone."""
    roof = case.roofline
    put_in = dict(case.amounts)
    put_in["tokens"] = Amount(tokens, Unit.COUNT)
    put_in["attention"] = Amount(case.attention_flops(tokens), Unit.OPERATIONS)
    put_in["weights"] = Amount(roof.read(tokens), Unit.BYTES)
    computing_s = (2.0 * roof.active * tokens + case.attention_flops(tokens)) / roof.peak
    binds = COMPUTE if computing_s >= roof.read(tokens) / roof.bandwidth else WEIGHTS
    prompt = solve(name, f"a prompt of {tokens:,}", Unit.SECONDS, PREFILL, **put_in)
    return prompt.expecting(case.prefill(tokens)).bound_by(binds)


def _attention_as_long(case: Case) -> int | None:
    """The least length at which the pairs cost as much as the weights; None: at none looked at."""
    shorter = largest(lambda n: case.attention_flops(n) < 2.0 * case.roofline.active * n, MOST_PROMPT)
    return None if shorter == MOST_PROMPT else shorter + 1


def _table(case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for length in LENGTHS:
        value = time_of(case, length)
        seconds = case.prompt_s(length)
        attention = case.attention_flops(length)
        rows.append(
            (
                length,
                value.value,
                seconds,
                length / seconds,
                attention / (attention + 2.0 * case.roofline.active * length),
                value.binds,
            )
        )
    columns = (
        Column("tokens", "prompt", Unit.TOKENS),
        Column("ideal_s", "ideal", Unit.SECONDS),
        Column("expected_s", "expected", Unit.SECONDS),
        Column("tokens_per_s", "rate", Unit.TOKENS_PER_S),
        Column("attention_share", "attention's share of the work", Unit.SHARE),
        Column("binds", "what binds"),
    )
    numbers = {name: case.amounts[name] for name in ("active", "peak", "bandwidth")}
    return Table("prefill_by_length", columns, tuple(rows), Formula(PREFILL), numbers)


def _chart(case: Case) -> Chart:
    found = [(length, time_of(case, length)) for length in LENGTHS]
    lines = [Line("ideal", tuple((float(n), value.value) for n, value in found), "s1 dash")]
    lines.append(Line("expected", tuple((float(n), case.prompt_s(n)) for n in LENGTHS), "s2"))
    target = case.targets.ttft_s
    return Chart(
        caption="Prefill time by length",
        reading="Flat while the weights are being read, then in proportion to the tokens, at last with their square.",
        x_label="tokens of the prompt",
        y_label="time",
        lines=tuple(lines),
        marks=(Mark("y", target, f"TTFT target {show(target, Unit.SECONDS)}"),),
        y_unit=Unit.SECONDS,
    )
