"""The scheduler's slice of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.classes import BUILT_IN, TrafficClass
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler may spend. Checked when made; wrong values raise `ConfigError` naming the field."""

    num_blocks: int  # KV blocks in the pool
    max_model_len: int  # most tokens of one sequence, prompt and output together
    block_size: int = 16  # tokens in a KV block
    max_num_batched_tokens: int = 2048  # token budget of one step, for the policies that have one
    max_num_seqs: int = 256  # most running requests
    prefix_caching: bool = True
    max_waiting: int | None = None  # longest queue before `submit` answers QUEUE_FULL; None is unbounded
    policy: str = "decode_first"
    policy_options: tuple[tuple[str, bool | int | float | str], ...] = ()  # the policy's own knobs, by name
    classes: tuple[TrafficClass, ...] = BUILT_IN
    # Digest of everything that decides what a KV block holds: weights, tokenizer, dtype, layout, adapter. Blocks are
    # shared only within one namespace, so that new weights under an old name never meet old KV.
    namespace: str = ""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        names = [kind.name for kind in self.classes]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"classes are {names}; there must be at least one, and no name twice")
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be 0 or more, or left out for no bound")
