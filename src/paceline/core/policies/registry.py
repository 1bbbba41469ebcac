"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.desk import Desk
from paceline.core.policies.decode_first import DecodeFirst
from paceline.errors import ConfigError


class Policy(Protocol):
    """Decides one step. Must be deterministic: the same calls give the same decisions, across processes."""

    name: str

    def decide(self, desk: Desk) -> None:
        """Give tokens with `desk.grow` and `desk.admit`, take memory with `desk.preempt`."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "decode_first": DecodeFirst,
}


def make_policy(name: str) -> Policy:
    """The policy of that name; `ConfigError` names those there are."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; it must be one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
