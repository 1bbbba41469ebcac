"""What a replica of the fleet is made of. Members of one blueprint are alike; a fleet may mix blueprints."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import ALIASES
from paceline.core.protocols import CostModel
from paceline.core.shape import StepShape
from paceline.errors import ConfigError
from paceline.simulate.fleet.link import LinkSpec
from paceline.simulate.fleet.speculation import Speculation, SpeculativeBackend
from paceline.simulate.replica import Replica

SPEED_PROMPT = 2048  # tokens of the prefill by which the speeds of different chips are compared


class Role(Enum):
    """Which part of a request a replica does."""

    WHOLE = "whole"
    PREFILL = "prefill"  # the prompt and the first token
    DECODE = "decode"  # every further token


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A replica's engine, hardware and price. `cost` is the law of the hardware and is shared by its members."""

    config: SchedulerConfig
    cost: CostModel
    role: Role = Role.WHOLE
    learns: Callable[[], CostModel] | None = None  # makes the scheduler's own cost model, for policies that ask one
    speculation: Speculation | None = None
    jitter: bool = False  # draw step times from the range of their estimate
    chips: int = 1
    chip: str = ""  # its name, for the report
    price_per_chip_hour: float | None = None
    kv_bytes_per_token: float = 0.0  # over all chips of the replica
    network: LinkSpec | None = None  # towards other replicas; None: KV arrives in no time
    cold_start_s: float = 0.0  # from the decision to start it to its first request

    def __post_init__(self) -> None:
        if self.chips < 1:
            raise ConfigError(f"chips is {self.chips}; a replica has at least one")
        if self.cold_start_s < 0.0:
            raise ConfigError(f"cold_start_s is {self.cold_start_s}; it must be 0 or more")
        if self.network is not None and self.network.bytes_per_s <= 0.0:
            raise ConfigError(f"the network moves {self.network.bytes_per_s} bytes/s; it must be above 0")
        if self.speculation is not None and ALIASES.get(self.config.policy, self.config.policy) == "prefill_first":
            # A sequence that got several tokens has several to catch up with, which this policy reads as a prompt under
            # way, and it cuts one prompt at a time.
            raise ConfigError("speculation is not simulated under the policy prefill_first: choose another")
        if self.role is not Role.WHOLE and not self.config.prefix_caching:
            raise ConfigError(
                "prefill and decode pools hand KV over through the prefix cache: prefix_caching must be on"
            )

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed of a long prefill, the unit in which a router compares chips."""
        return SPEED_PROMPT / self.cost.predict(StepShape().plus(0, SPEED_PROMPT)).seconds

    def build(self, name: str, start_s: float, seed: str) -> Replica:
        """A fresh engine with an empty cache."""
        learns = None if self.learns is None else self.learns()
        jitter = random.Random(f"{seed}:jitter:{name}") if self.jitter else None  # noqa: S311  reproducible
        replica = Replica(name, self.config, self.cost, learns=learns, start_s=start_s, jitter=jitter)
        if self.speculation is not None:
            backend = SpeculativeBackend(
                self.cost,
                replica.clock,
                self.speculation,
                max_model_len=self.config.max_model_len,
                seed=f"{seed}:{name}",
                jitter=jitter,
            )
            replica.backend = replica.loop.backend = backend
        replica.warm_up()
        return replica


def cold_start_s(
    weights_bytes: float, storage_bytes_per_s: float, *, process_s: float = 10.0, warm_up_s: float = 20.0
) -> float:
    """From nothing to serving: the process and its libraries, weights from storage, graph capture and warm-up.

    The defaults are the order of what vLLM's start-up log shows for an 8 B model on one GPU; give your own.
    """
    return process_s + weights_bytes / storage_bytes_per_s + warm_up_s
