"""The questions, in the order of the page. A new one is a file in `questions/` and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from paceline.errors import ConfigError
from paceline.plan.answer import Answer
from paceline.plan.case import Case
from paceline.plan.questions import (
    attention,
    budget,
    cost,
    critical_batch,
    curve,
    decode,
    disaggregation,
    fit,
    kv,
    operations,
    parallel,
    pool,
    prefill,
    reload,
    speculation,
    timeline,
)

QUESTIONS: dict[str, Callable[[Case], Answer | None]] = {
    "fit": fit.ask,
    "pool": pool.ask,
    "kv": kv.ask,
    "decode": decode.ask,
    "curve": curve.ask,
    "critical_batch": critical_batch.ask,
    "prefill": prefill.ask,
    "attention": attention.ask,
    "operations": operations.ask,
    "budget": budget.ask,
    "parallel": parallel.ask,
    "disaggregation": disaggregation.ask,
    "reload": reload.ask,
    "speculation": speculation.ask,
    "timeline": timeline.ask,
    "cost": cost.ask,
}


def answer(case: Case, questions: Iterable[str] = ()) -> list[Answer]:
    """The answers, of all questions where none is named; those that do not arise are left out. ConfigError: unknown."""
    wanted = list(questions) or list(QUESTIONS)
    found = [find(name)(case) for name in dict.fromkeys(wanted)]
    return [one for one in found if one is not None]


def find(name: str) -> Callable[[Case], Answer | None]:
    """The question of this name. ConfigError with the nearest ones where there is none."""
    plain = name.strip().lower().replace("-", "_")
    if plain in QUESTIONS:
        return QUESTIONS[plain]
    near = difflib.get_close_matches(plain, QUESTIONS, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"question {name!r} is not known; {hint}(known: {', '.join(QUESTIONS)})")
