"""Cases that the tests of this room ask about."""

from __future__ import annotations

from typing import Any

from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.plan.answer import Answer
from paceline.plan.case import Case
from paceline.plan.registry import find


def case(model: str = "llama-3-8b", chip: str = "l40s", *, layout: dict[str, Any] | None = None, **about: Any) -> Case:
    """A case by the names of its model and chip; `layout` goes to the deployment, the rest to the case."""
    return Case(Deployment(find_model(model), find_chip(chip), **(layout or {})), **about)


def ask(question: str, about: Case) -> Answer:
    """The answer, which must arise."""
    found = find(question)(about)
    assert found is not None
    return found
