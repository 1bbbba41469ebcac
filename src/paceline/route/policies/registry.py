"""Routers by name: one line each, and the names other projects' users know them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.policies.parts.knobs import with_knobs
from paceline.errors import ConfigError
from paceline.route.policies.base import Router
from paceline.route.policies.least_load import LeastLoad
from paceline.route.policies.power_of_two import PowerOfTwo
from paceline.route.policies.prefix_aware import PrefixAware
from paceline.route.policies.random_pick import RandomPick
from paceline.route.policies.round_robin import RoundRobin
from paceline.route.policies.sticky import Sticky

ROUTERS: dict[str, Callable[..., Router]] = {
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "random": RandomPick,
    "round_robin": RoundRobin,
    "sticky": Sticky,
}

ALIASES = {
    "cache_aware": "prefix_aware",
    "consistent_hashing": "sticky",
    "jsq": "least_load",
    "kv": "prefix_aware",
    "session": "sticky",
}


def make_router(name: str, options: Iterable[tuple[str, Any]] = ()) -> Router:
    """The router of that name or alias with its knobs set; `ConfigError` names what there is."""
    kind = ROUTERS.get(ALIASES.get(name, name))
    if kind is None:
        raise ConfigError(f"router is {name!r}; it must be one of {', '.join(sorted([*ROUTERS, *ALIASES]))}")
    return with_knobs("router", name, kind, options)
