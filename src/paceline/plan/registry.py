"""The questions, in the order of the page. A new one is a file in `questions/` and a line here."""

from __future__ import annotations

import difflib
import importlib
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
    """The answers to the named questions, or to all that arise where none is named. ConfigError: unknown.

    Of a named one that does not arise, the answer says what is missing.
    """
    named = [_name_of(name) for name in dict.fromkeys(questions)]
    found = [(name, QUESTIONS[name](case)) for name in dict.fromkeys(named or QUESTIONS)]
    return [one or _not_arising(case, name) for name, one in found if one is not None or named]


def question_of(name: str) -> str:
    """The question that its file is about, as its first lines have it."""
    text = importlib.import_module(QUESTIONS[name].__module__).__doc__ or ""
    return " ".join(text.partition("\n\n")[0].split())


def _not_arising(case: Case, name: str) -> Answer:
    if name == "cost" and case.price_per_hour is None:
        why = "no price is given; --price says what one chip costs an hour"
    elif name != "cost" and not case.roofline.knows_compute:
        why = (
            f"no rate at which {case.chip.title} multiplies {case.format} is known; a .toml file of your own may say it"
        )
    else:
        why = "no sequence of this context fits; `paceline plan fit` says what would"
    return Answer(name=name, question=question_of(name), headline=f"Not answered: {why}.")


def find(name: str) -> Callable[[Case], Answer | None]:
    """The question of this name. ConfigError with the nearest ones where there is none."""
    return QUESTIONS[_name_of(name)]


def _name_of(name: str) -> str:
    plain = name.strip().lower().replace("-", "_")
    if plain in QUESTIONS:
        return plain
    near = difflib.get_close_matches(plain, QUESTIONS, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"question {name!r} is not known; {hint}(known: {', '.join(QUESTIONS)})")
