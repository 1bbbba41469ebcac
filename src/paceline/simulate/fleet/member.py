"""One replica's life in the fleet: it starts cold, serves, dies, and may come back empty."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import inf

from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.journey import Journey
from paceline.simulate.fleet.link import Link
from paceline.simulate.fleet.tiers import Tier
from paceline.simulate.replica import Replica
from paceline.simulate.usage import UsageReport


class State(Enum):
    """Where a member stands. Paid for unless it is OFF."""

    STARTING = "starting"
    UP = "up"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Life:
    """One stretch of being up, from the end of its cold start to its death or the end of the run."""

    start_s: float
    end_s: float
    usage: UsageReport


class Member:
    """A named place in the fleet. Each life of it is a new `Replica`; `epoch` tells lives apart."""

    def __init__(self, name: str, blueprint: Blueprint, tiers: tuple[Tier, ...], seed: str) -> None:
        self.name = name
        self.blueprint = blueprint
        self.tiers = tiers  # fastest first; what they hold outlives the replica
        self.state = State.OFF
        self.replica: Replica | None = None
        self.epoch = 0
        self.returns = False  # while it is off: whether it will be started again
        self.watched_s = inf  # when a turn has been entered on the timeline
        self.lives: list[Life] = []
        self.paid_s = 0.0  # of finished stretches
        self.inward: deque[Journey] = deque()  # prefilled elsewhere, waiting for room here
        self.promised_blocks = 0  # to KV on its way here
        self.coming = 0  # requests whose KV is on its way here
        self.landed: list[int] = []  # blocks of those that have come since the last turn
        self.out = None if blueprint.network is None else Link(blueprint.network)
        self.into = None if blueprint.network is None else Link(blueprint.network)
        self._seed = seed
        self._since_s = 0.0  # of the stretch that is paid for now
        self._up_s = 0.0

    @property
    def role(self) -> Role:
        return self.blueprint.role

    @property
    def is_up(self) -> bool:
        return self.state is State.UP

    @property
    def engine(self) -> Replica:
        """Its replica, while it is up."""
        assert self.replica is not None, f"{self.name} is {self.state.value}"
        return self.replica

    @property
    def cache_tokens(self) -> int:
        """KV positions that fit its memory."""
        config = self.blueprint.config
        return config.num_blocks * config.block_size

    def start(self, now_s: float) -> float:
        """Begin a cold start; when it will be up."""
        assert self.state is State.OFF
        self.state, self._since_s = State.STARTING, now_s
        return now_s + self.blueprint.cold_start_s

    def come_up(self, now_s: float) -> None:
        """Ready: an engine with an empty cache."""
        assert self.state is State.STARTING
        self.epoch += 1
        self.replica = self.blueprint.build(self.name, now_s, f"{self._seed}:{self.epoch}")
        self.state, self._up_s, self.watched_s = State.UP, now_s, inf

    def die(self, now_s: float) -> None:
        """The engine is gone, or was never ready. Who was there is the fleet's to know."""
        if self.replica is not None:
            self.lives.append(Life(self._up_s, now_s, self.replica.usage.report(now_s - self._up_s)))
            self.replica = None
        self.epoch += 1  # what was under way towards it arrives at nobody
        self.paid_s += now_s - self._since_s
        self.state, self.watched_s = State.OFF, inf
        self.inward.clear()
        self.landed.clear()
        self.promised_blocks = self.coming = 0

    def settle(self) -> None:
        """The engine has looked at its inbox: what had landed is running or waits in line."""
        self.promised_blocks -= sum(self.landed)
        self.coming -= len(self.landed)
        self.landed.clear()

    def close(self, now_s: float) -> None:
        """The run is over."""
        if self.state is not State.OFF:
            self.die(now_s)
