"""The byte budget of a chip: weights, activations, what the runtime takes, and the KV blocks that are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cost.deployment import Deployment

GB = 1e9
# A process's context on the chip, its libraries' workspaces and the captured graphs of its decode steps. Together with
# the sampler's buffers below this is what a vLLM 0.19 on an RTX 4090 left out of its budget (1.24 GB at 2,588 blocks).
RUNTIME_BYTES = 0.65 * GB
COLLECTIVE_BYTES = 0.4 * GB  # buffers of the collectives' library, once there is more than one chip
# Sampling a row over the vocabulary: logits in 16 and 32 bits, their sorted copy, and 64-bit positions.
SAMPLER_BYTES = 2 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes a chip needs beside weights and KV."""

    activations: float
    runtime: float

    @classmethod
    def of(cls, deployment: Deployment, step_tokens: int, max_rows: int) -> Reserve:
        """For steps of at most `step_tokens` tokens in `max_rows` rows.

        The peak is the larger of two moments: an MLP's intermediate values (16 bits) with three copies of the hidden
        state, and the sampler's buffers.
        """
        model = deployment.model
        inter = model.ffn / deployment.tp if model.dense_layers else 0.0
        if model.experts is not None:
            routed = model.experts.active * model.experts.inter / deployment.width
            inter = max(inter, routed + model.experts.shared_inter / deployment.tp)
        tokens = -(-step_tokens // deployment.dp)
        layer = 2.0 * tokens * (model.matrices * inter + 3 * model.hidden)
        sampler = SAMPLER_BYTES * -(-max_rows // deployment.dp) * float(model.vocab)
        runtime = RUNTIME_BYTES + (COLLECTIVE_BYTES if deployment.chips > 1 else 0.0)
        return cls(max(layer, sampler), runtime)


@dataclass(frozen=True, slots=True)
class Memory:
    """One chip's memory, in bytes. `kv_bytes` may be negative: so much is missing."""

    total_bytes: float
    utilization: float
    share_of: str
    weights_bytes: float
    activation_bytes: float
    runtime_bytes: float
    kv_bytes: float
    block_size: int  # tokens
    block_bytes: float
    num_blocks: int
    copies: int = 1  # of the attention, each with as many blocks of its own

    @classmethod
    def share(
        cls,
        *,
        total: float,
        utilization: float,
        share_of: str,
        weights: float,
        reserve: Reserve,
        token: float,
        block_size: int,
        copies: int = 1,
        used: float | None = None,
    ) -> Memory:
        """Share `total` out; `token` is the bytes of one token's keys and values on this chip."""
        if not 0.0 < utilization <= 1.0:
            raise ConfigError(f"utilization is {utilization:g}; it must be above 0 and at most 1")
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; it must be at least 1")
        if share_of not in ("total", "free"):
            raise ConfigError(f"share_of is {share_of!r}; it must be total or free")
        if used is not None:
            activations, runtime = 0.0, used - weights
        else:
            activations, runtime = reserve.activations, reserve.runtime
        spent = weights + activations + runtime
        kv_bytes = utilization * total - spent if share_of == "total" else utilization * (total - spent)
        block_bytes = block_size * token
        blocks = max(0, int(kv_bytes // block_bytes))
        return cls(
            total,
            utilization,
            share_of,
            weights,
            activations,
            runtime,
            kv_bytes,
            block_size,
            block_bytes,
            blocks,
            copies,
        )

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit, over the copies of the attention."""
        return self.num_blocks * self.block_size * self.copies

    @property
    def fits(self) -> bool:
        """Whether there is room for a block at all."""
        return self.num_blocks > 0

    def line(self) -> str:
        """The budget in one line."""
        left = f"{self.kv_bytes / GB:.2f} GB for KV" if self.kv_bytes >= 0 else f"{-self.kv_bytes / GB:.2f} GB missing"
        return (
            f"{self.utilization:.0%} of {'' if self.share_of == 'total' else 'what is free of '}"
            f"{self.total_bytes / GB:.1f} GB a chip, {self.weights_bytes / GB:.2f} GB of weights, "
            f"{self.activation_bytes / GB:.2f} GB of activations, {self.runtime_bytes / GB:.2f} GB of runtime: {left}, "
            f"{self.num_blocks:,} blocks of {self.block_size} tokens"
        )
