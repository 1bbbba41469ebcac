"""What does one request's timeline say: first token, tokens after it, tokens a second overall?"""

from __future__ import annotations

from paceline.plan.answer import Answer, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.units import Unit, show


def ask(case: Case) -> Answer | None:
    """From the stamps of a real request where they are given, else from what is expected of one."""
    tokens = case.traffic.output
    if case.stamps is None:
        if not case.roofline.knows_compute:
            return None
        first_s = case.prompt_s(case.traffic.prompt)
        step_s = case.at_own_context().step_s(case.traffic.batch)
        stamps = (0.0, first_s, first_s + (tokens - 1) * step_s)
    else:
        stamps = case.stamps
    values = times_of(*stamps, tokens)
    told = {value.name: show(value.value, value.unit) for value in values}
    headline = f"First token after {told['ttft_s']}"
    if "tpot_s" in told:
        headline += f", one every {told['tpot_s']} after it ({told['decode_rate']})"
    overall = f"; {told['overall_rate']} overall" if "overall_rate" in told else ""
    return Answer(
        name="timeline",
        question="What does one request's timeline say?",
        headline=f"{headline}{overall}.",
        values=values,
        notes=()
        if case.stamps
        else (f"expected of a prompt of {case.traffic.prompt:,} alone, then {case.traffic.batch} decoding together",),
    )


def times_of(sent_s: float, first_s: float, last_s: float, tokens: int) -> tuple[Value, ...]:
    """TTFT, time per output token, and tokens a second after the first token and overall.

    The first token is not in the time per token: N tokens have N - 1 gaps. With one token there is none.
    """
    put_in = {
        "sent": Amount(sent_s, Unit.SECONDS),
        "first": Amount(first_s, Unit.SECONDS),
        "last": Amount(last_s, Unit.SECONDS),
        "tokens": Amount(tokens, Unit.COUNT),
    }
    values = [solve("ttft_s", "time to first token", Unit.SECONDS, "first - sent", **put_in)]
    if tokens > 1 and last_s > first_s:
        per_token = solve("tpot_s", "time per token", Unit.SECONDS, "(last - first) / (tokens - 1)", **put_in)
        rate = solve("decode_rate", "once it runs", Unit.TOKENS_PER_S, "1 / per_token", per_token=per_token)
        values += [per_token, rate]
    if last_s > sent_s:
        values.append(solve("overall_rate", "overall", Unit.TOKENS_PER_S, "tokens / (last - sent)", **put_in))
    return tuple(values)
