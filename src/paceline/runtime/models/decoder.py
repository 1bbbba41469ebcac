"""The decoder that Llama gave to most open models; families differ in little and say only that.

Pre-norm layers, rotary positions, grouped-query attention, gated MLPs. Biases, windows and rotary variants come from
the config; a family overrides what is left (`qk_norm`, `mlp`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.kernels.attention import paged_attention
from paceline.runtime.kernels.kvpool import KVPool, KVSpec
from paceline.runtime.layers.linear import Linear
from paceline.runtime.layers.mlp import GatedMLP, activation
from paceline.runtime.layers.norm import RMSNorm
from paceline.runtime.layers.rope import RotaryEmbedding, apply_rope
from paceline.runtime.models.base import Weights

MLP = Callable[[Tensor], Tensor]  # [T, hidden] -> [T, hidden]


class Reader:
    """Looks tensors up and brings them to the model's device and dtype."""

    def __init__(self, weights: Weights, device: torch.device | str, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str) -> Tensor:
        """One tensor of the checkpoint."""
        return self._weights[name].to(device=self._device, dtype=self._dtype)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """The maps `name`.weight (and `name`.bias) as one, outputs side by side."""
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        return Linear([self.tensor(f"{name}.weight") for name in names], biases)


class Decoder:
    """Implements `models.base.Model`. Subclasses are the families."""

    qk_norm = False  # queries and keys are normalized head by head before rotation

    def __init__(
        self, config: ModelConfig, weights: Weights, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        read = Reader(weights, device, dtype)
        self.vocab_size = config.vocab_size
        spec = KVSpec(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.kv_specs = (spec,) * config.num_hidden_layers
        self.embedding = read.tensor("model.embed_tokens.weight")
        self.rope = RotaryEmbedding(config).to(device)
        self.layers = [self._layer(read, config, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(read.tensor("model.norm.weight"), config.rms_norm_eps)
        # Tied or not, the head is a matrix of its own in memory: laid out for products, not for looking rows up.
        self.head = Linear(self.embedding) if config.tie_word_embeddings else read.linear("lm_head")

    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """See `Model.forward`."""
        hidden = F.embedding(batch.token_ids, self.embedding)
        cos, sin = self.rope(batch.positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, batch, pool)
        return self.head(self.norm(hidden[batch.logit_rows])).float()

    def mlp(self, read: Reader, config: ModelConfig, layer: int) -> MLP:
        """The feed-forward block of a layer."""
        return dense_mlp(read, config, f"model.layers.{layer}.mlp")

    def _layer(self, read: Reader, config: ModelConfig, index: int) -> _Layer:
        prefix = f"model.layers.{index}."
        attention = Attention(read, config, index, qk_norm=self.qk_norm)
        before, after = (
            RMSNorm(read.tensor(prefix + name), config.rms_norm_eps)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        )
        return _Layer(before, attention, after, self.mlp(read, config, index))


def dense_mlp(read: Reader, config: ModelConfig, prefix: str) -> GatedMLP:
    """A gated MLP under its usual names."""
    return GatedMLP(
        read.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj", bias=config.mlp_bias),
        read.linear(f"{prefix}.down_proj", bias=config.mlp_bias),
        activation(config.hidden_act),
    )


class _Layer:
    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same, changed in place."""
        hidden += self.attention(self.attention_norm(hidden), cos, sin, batch, pool)
        hidden += self.mlp(self.mlp_norm(hidden))
        return hidden


class Attention:
    """Grouped-query attention over the paged pool; q, k and v are one map."""

    __slots__ = ("head_dim", "heads", "index", "kv_heads", "out", "qk_norm", "qkv", "scale", "window")

    def __init__(self, read: Reader, config: ModelConfig, index: int, *, qk_norm: bool) -> None:
        prefix = f"model.layers.{index}.self_attn."
        self.index = index
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.scale = config.head_dim**-0.5
        self.window = config.layer_window(index)
        self.qkv = read.linear(*(prefix + name for name in ("q_proj", "k_proj", "v_proj")), bias=config.attention_bias)
        self.out = read.linear(prefix + "o_proj", bias=config.attention_out_bias)
        self.qk_norm: RMSNorm | None = None
        if qk_norm:
            q_weight, k_weight = (read.tensor(f"{prefix}{name}_norm.weight") for name in "qk")
            each_head = torch.cat([q_weight.expand(self.heads, -1), k_weight.expand(self.kv_heads, -1)])
            self.qk_norm = RMSNorm(each_head, config.rms_norm_eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """[T, hidden] -> [T, hidden]; cos and sin are [T, rotary_dim]."""
        rotating = self.heads + self.kv_heads
        qkv = self.qkv(x).unflatten(1, (rotating + self.kv_heads, self.head_dim))
        qk, v = qkv[:, :rotating], qkv[:, rotating:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = apply_rope(qk, cos, sin)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        mixed = paged_attention(q, k, v, pool, self.index, batch, scale=self.scale, window=self.window)
        return self.out(mixed.flatten(1, 2))
