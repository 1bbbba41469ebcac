"""sticky: a session stays where it began, unless that replica is overloaded.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): a session ranks all replicas by a hash
of both names and takes the first whose load is within `bound` times the mean. Nothing is kept per session; a replica
that leaves or joins moves only its own sessions. A request without a session goes by its first prefix block, so that
one system prompt has one home; with neither, by its own id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from paceline.core.policies.parts.knobs import knob
from paceline.route.policies.base import Ask, Load, Router


@dataclass
class Sticky(Router):
    """Rendezvous hashing, bounded by requests in flight."""

    bound: float = knob(1.25, least=1.0)  # most load of a replica, as a multiple of the mean

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        """The session's first choice that is not overloaded. Somebody is always at or below the mean."""
        speed = sum(load.speed for load in loads)
        mean = (sum(load.requests for load in loads) + 1) / speed  # with this one
        key = _key(ask)
        for load in sorted(loads, key=lambda load: _rank(key, load.name)):
            if load.requests + 1 <= max(1.0, self.bound * mean * load.speed):
                return load.name
        return min(loads, key=lambda load: (load.requests / load.speed, load.name)).name


def _key(ask: Ask) -> bytes:
    if ask.session:
        return b"s" + ask.session.encode()
    if ask.blocks:
        first = ask.blocks[0]
        return b"b" + (first if isinstance(first, bytes) else str(first).encode())
    return b"r" + ask.request_id.encode()


def _rank(key: bytes, name: str) -> bytes:
    return blake2b(key + b"\0" + name.encode(), digest_size=8).digest()
