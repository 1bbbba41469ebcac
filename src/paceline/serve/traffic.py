"""Which class of traffic a request belongs to, and what that class promises it.

`service_tier` (OpenAI's field) and `paceline: {"class", "ttft_ms", "itl_ms", "e2e_ms"}` (ours) say so; the key says
what its holder may ask for. The tenant comes from the key alone, never from the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.classes import BATCH, INTERACTIVE, STANDARD, TrafficClass
from paceline.errors import BadRequest, Forbidden
from paceline.serve.keys import Caller
from paceline.serve.schemas import PacelineOptions

# OpenAI's tiers, and the classes they stand for; "auto" is the server's default class.
TIERS = {"auto": None, "priority": INTERACTIVE.name, "default": STANDARD.name, "flex": BATCH.name}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The class a request runs in, and its targets in seconds: its own, or the class's. None: nothing is promised."""

    kind: TrafficClass = STANDARD
    ttft_s: float | None = STANDARD.ttft_s
    itl_s: float | None = STANDARD.itl_s
    e2e_s: float | None = STANDARD.e2e_s
    tier: str | None = None  # what to report as service_tier; None when the client did not ask for one

    def applied(self) -> dict[str, Any]:
        """What a response says about it, under `paceline`."""
        targets = {"ttft_ms": self.ttft_s, "itl_ms": self.itl_s, "e2e_ms": self.e2e_s}
        return {"class": self.kind.name} | {name: None if s is None else 1000 * s for name, s in targets.items()}


def resolve_traffic(
    service_tier: str | None,
    own: PacelineOptions | None,
    caller: Caller,
    classes: Sequence[TrafficClass],
    default_class: str,
) -> Traffic:
    """The class that is applied. Raises BadRequest for an unknown one, Forbidden for one the key may not use."""
    named, param = _named(service_tier, own)
    name = named or default_class
    kind = next((kind for kind in classes if kind.name == name), None)
    if kind is None:
        shown = ", ".join(kind.name for kind in classes)
        raise BadRequest(f"class {name[:64]!r} is not served here; it must be one of {shown}", param=param)
    if not caller.may_use(name):
        raise Forbidden(
            f"key {caller.name!r} may not use class {name!r}; it allows {', '.join(caller.classes or ())}",
            param=param,
            code="class_not_allowed",
        )
    ttft_s, itl_s, e2e_s = _targets(kind, own or PacelineOptions())
    return Traffic(kind, ttft_s, itl_s, e2e_s, None if service_tier is None else _tier_of(name))


def _targets(kind: TrafficClass, own: PacelineOptions) -> tuple[float | None, float | None, float | None]:
    """To the first token, between tokens, to the last one: the request's own, or its class's. In seconds.

    None of the first two is above the third: no token comes after the last one. A request that says otherwise itself
    contradicts itself (BadRequest); a target that its class brings gives way.
    """
    for field, value in (("ttft_ms", own.ttft_ms), ("itl_ms", own.itl_ms)):
        if value is not None and own.e2e_ms is not None and value > own.e2e_ms:
            raise BadRequest(
                f"paceline.{field} {value:g} is above paceline.e2e_ms {own.e2e_ms:g}; no token follows the last one",
                param=f"paceline.{field}",
            )
    e2e_s = kind.e2e_s if own.e2e_ms is None else own.e2e_ms / 1000
    ttft_s = kind.ttft_s if own.ttft_ms is None else own.ttft_ms / 1000
    itl_s = kind.itl_s if own.itl_ms is None else own.itl_ms / 1000
    return _at_most(ttft_s, e2e_s), _at_most(itl_s, e2e_s), e2e_s


def _at_most(target_s: float | None, limit_s: float | None) -> float | None:
    """Where nothing was promised, nothing is."""
    return target_s if target_s is None or limit_s is None else min(target_s, limit_s)


def _named(service_tier: str | None, own: PacelineOptions | None) -> tuple[str | None, str]:
    """The class that the body names, and the field that does."""
    if service_tier is not None and service_tier not in TIERS:
        raise BadRequest(
            f"service_tier is {service_tier[:64]!r}; it must be one of {', '.join(TIERS)}", param="service_tier"
        )
    by_tier = TIERS[service_tier] if service_tier is not None else None
    if own is None or own.traffic_class is None:
        return by_tier, "service_tier"
    if by_tier is not None and by_tier != own.traffic_class:
        raise BadRequest(
            f"service_tier {service_tier!r} stands for class {by_tier!r} and paceline.class says "
            f"{own.traffic_class[:64]!r}: name one of them",
            param="paceline.class",
        )
    return own.traffic_class, "paceline.class"


def _tier_of(name: str) -> str:
    return next((tier for tier, kind in TIERS.items() if kind == name), "default")
