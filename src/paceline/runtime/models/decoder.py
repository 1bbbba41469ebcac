"""The decoder that Llama gave to most open models; families differ in little and say only that.

Pre-norm layers, rotary positions, grouped-query attention, gated MLPs. Biases, windows and rotary variants come from
the config; a family overrides what is left (`qk_norm`, `mlp`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.kernels.kvpool import KVPool, KVSpec
from paceline.runtime.layers.attention import Attention
from paceline.runtime.layers.layer import Layer
from paceline.runtime.layers.mlp import MLP
from paceline.runtime.layers.norm import RMSNorm
from paceline.runtime.layers.parts import Parts
from paceline.runtime.layers.rope import RotaryEmbedding


class Decoder:
    """Implements `models.base.Model`. Subclasses are the families."""

    qk_norm = False  # queries and keys are normalized head by head before rotation

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        self.vocab_size = config.vocab_size
        spec = KVSpec(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.kv_specs = (spec,) * config.num_hidden_layers
        tied = config.tie_word_embeddings
        self.embedding, self.head = parts.ends("model.embed_tokens", None if tied else "lm_head")
        self.rope = RotaryEmbedding(config, parts.device)
        self.layers = parts.stack([self._layer(parts, config, i) for i in range(config.num_hidden_layers)])
        self.norm = parts.norm("model.norm.weight", config.rms_norm_eps)

    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """See `Model.forward`."""
        hidden = self.embedding(batch.token_ids)
        cos, sin = self.rope(batch.positions, hidden.dtype, max(batch.context_lens))
        hidden = self.layers(hidden, cos, sin, batch, pool)
        return self.head(self.norm(hidden)).float()

    def mlp(self, parts: Parts, config: ModelConfig, layer: int) -> MLP:
        """The feed-forward block of a layer."""
        return dense_mlp(parts, config, f"model.layers.{layer}.mlp")

    def _layer(self, parts: Parts, config: ModelConfig, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        before, after = (
            parts.norm(prefix + name, config.rms_norm_eps)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        )
        return Layer(before, self._attention(parts, config, index), after, self.mlp(parts, config, index))

    def _attention(self, parts: Parts, config: ModelConfig, index: int) -> Attention:
        prefix = f"model.layers.{index}.self_attn."
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qk_norm = None
        if self.qk_norm:
            q_weight, k_weight = (parts.tensor(f"{prefix}{name}_norm.weight") for name in "qk")
            each_head = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
            qk_norm = RMSNorm(each_head, config.rms_norm_eps)
        return Attention(
            index,
            heads,
            kv_heads,
            config.head_dim,
            parts.linear(*(prefix + name for name in ("q_proj", "k_proj", "v_proj")), bias=config.attention_bias),
            parts.linear(prefix + "o_proj", bias=config.attention_out_bias),
            parts.attention,
            config.layer_window(index),
            qk_norm,
        )


def dense_mlp(parts: Parts, config: ModelConfig, prefix: str) -> MLP:
    """A gated MLP under its usual names."""
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")
    return parts.gated_mlp(names, config.hidden_act, bias=config.mlp_bias)
