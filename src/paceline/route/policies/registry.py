"""Routers by name: one line each, and the names other projects' users know them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

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
    knobs = {field.name: field.default for field in fields(kind) if field.init}  # type: ignore[arg-type]
    chosen = dict(options)
    for key, value in chosen.items():
        if key not in knobs:
            raise ConfigError(f"router {name} has no option {key!r}; it has {', '.join(knobs) or 'none'}")
        wanted = type(knobs[key])
        if wanted is float and type(value) is int:
            chosen[key] = float(value)
        elif type(value) is not wanted:
            raise ConfigError(f"router option {key} is {value!r}; it must be of type {wanted.__name__}")
    return kind(**chosen)
