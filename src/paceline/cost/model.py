"""The dimensions of a transformer, and the counts that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.cost.precision import find_precision


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are kept as one small vector."""

    kv_rank: int  # of the vector kept, with `rope_dim` beside it
    rope_dim: int  # of the part that carries the position, shared by the heads
    q_rank: int  # of the queries' own bottleneck; 0: none
    nope_dim: int  # of a head's query and key, without position
    value_dim: int  # of a head's value


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. A token takes `active` of `count`, each `inter` wide, and every shared one."""

    count: int
    active: int
    inter: int
    shared_inter: int = 0  # width of the shared experts together; 0: none
    dense_layers: int = 0  # layers with a plain MLP (the model's `ffn`) in place of experts


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer. Flat, like the config.json it comes from. Sizes are counts of numbers, not bytes."""

    name: str
    layers: int
    hidden: int
    ffn: int  # width of a plain MLP; 0 where all layers have experts
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False  # the head is the embedding
    gated: bool = True  # three matrices in an MLP (SwiGLU), else two
    parallel: bool = False  # attention and MLP side by side (Falcon, GPT-J): one all-reduce a layer in place of two
    window: int = 0  # keys that a query sees in the layers that slide; 0: all
    window_layers: int = 0
    latent: Latent | None = None
    experts: Experts | None = None
    native: str = "bf16"  # precision of the published weights; see precision.py
    max_context: int = 0  # 0: not stated
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def matrices(self) -> int:
        """Matrices in an MLP or expert."""
        return 3 if self.gated else 2

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_layers(self) -> int:
        """Layers with a plain MLP."""
        return self.layers - self.moe_layers

    @property
    def full_layers(self) -> int:
        """Layers that attend to everything."""
        return self.layers - self.window_layers

    @property
    def embedding_params(self) -> int:
        """Of the table; the head has as many again unless it is tied."""
        return self.vocab * self.hidden

    @property
    def attention_params(self) -> int:
        """Of one layer: projections and norms."""
        norms = 2 * self.hidden
        if self.latent is None:
            return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + norms
        latent, heads = self.latent, self.heads
        query_dim = latent.nope_dim + latent.rope_dim
        queries = (
            latent.q_rank * (self.hidden + heads * query_dim) if latent.q_rank else self.hidden * heads * query_dim
        )
        down = self.hidden * (latent.kv_rank + latent.rope_dim)
        up = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        return queries + down + up + heads * latent.value_dim * self.hidden + norms

    @property
    def mlp_params(self) -> int:
        """Of one plain MLP."""
        return self.matrices * self.hidden * self.ffn

    @property
    def expert_params(self) -> int:
        """Of one expert of one layer."""
        return self.matrices * self.hidden * self.experts.inter if self.experts else 0

    @property
    def expert_side_params(self) -> int:
        """Of one layer with experts, what every token passes: router and shared experts."""
        if self.experts is None:
            return 0
        return self.hidden * self.experts.count + self.matrices * self.hidden * self.experts.shared_inter

    @property
    def params(self) -> int:
        """All of them."""
        experts = self.experts.count * self.expert_params if self.experts else 0
        return self._with_experts(experts) + self.embedding_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Those that one token meets: its experts, the shared ones, all else; embedding and head as in `params`."""
        experts = self.experts.active * self.expert_params if self.experts else 0
        return self._with_experts(experts) + self.embedding_params * (1 if self.tied else 2)

    @property
    def multiplied_params(self) -> int:
        """Those that a sampled token is multiplied with: the active ones without the table that is only looked up."""
        return self.active_params if self.tied else self.active_params - self.embedding_params

    @property
    def nominal_params(self) -> float:
        """`params` as people say it: to a tenth of a billion ("8.0 B"), below one billion to a million."""
        step = 1e8 if self.params >= 1e9 else 1e6
        return round(self.params / step) * step

    @property
    def kv_numbers(self) -> int:
        """Numbers kept for one token in one layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv: str = "bf16") -> float:
        """Bytes kept for one token, over all layers."""
        return self.layers * self.kv_numbers * find_precision(kv, what="kv").bytes

    def kv_bytes(self, context: int, kv: str = "bf16") -> float:
        """Bytes that a sequence of `context` tokens needs; layers that slide keep their window alone."""
        kept = self.full_layers * context + self.window_layers * min(context, self.window or context)
        return kept * self.kv_numbers * find_precision(kv, what="kv").bytes

    def _with_experts(self, experts: int) -> int:
        """Parameters of all layers and the last norm, with this many in the experts of a layer."""
        moe = self.moe_layers * (experts + self.expert_side_params)
        return self.layers * self.attention_params + self.dense_layers * self.mlp_params + moe + self.hidden
