"""Which class of traffic a request belongs to.

`service_tier` (OpenAI's field) and `paceline: {"class": ...}` (ours) both say so. There is one class for now; what the
scheduler does with others plugs in here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.classes import DEFAULT_CLASS
from paceline.errors import BadRequest, Forbidden
from paceline.serve.keys import Caller

CLASSES = (DEFAULT_CLASS,)
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The class a request runs in, and the tier to report for it."""

    name: str = DEFAULT_CLASS
    tier: str | None = None  # None when the client did not ask for one


def resolve_traffic(service_tier: str | None, wanted: str | None, caller: Caller) -> Traffic:
    """The class that is applied. Raises BadRequest for an unknown one, Forbidden for one the key may not use."""
    if service_tier is not None and service_tier not in TIERS:
        raise BadRequest(f"service_tier should be one of {', '.join(TIERS)}", param="service_tier")
    if wanted is not None and wanted not in CLASSES:
        raise BadRequest(f"paceline.class should be one of {', '.join(CLASSES)}", param="paceline.class")
    name = wanted or DEFAULT_CLASS
    if not caller.may_use(name):
        raise Forbidden(
            f"key {caller.name!r} may not use class {name!r}; it allows {', '.join(caller.classes or ())}",
            param="service_tier" if wanted is None else "paceline.class",
            code="class_not_allowed",
        )
    return Traffic(name, None if service_tier is None else "default")
