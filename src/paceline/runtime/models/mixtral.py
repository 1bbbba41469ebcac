"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.layers.mlp import GatedMLP, MixtureOfExperts, activation
from paceline.runtime.models.decoder import MLP, Decoder, Reader


class Mixtral(Decoder):
    """The decoder with experts w1 (gate), w3 (up) and w2 (down)."""

    def mlp(self, read: Reader, config: ModelConfig, layer: int) -> MLP:
        """The mixture of a layer."""
        prefix = f"model.layers.{layer}.block_sparse_moe"
        experts = [
            GatedMLP(
                read.linear(f"{prefix}.experts.{e}.w1", f"{prefix}.experts.{e}.w3"),
                read.linear(f"{prefix}.experts.{e}.w2"),
                activation(config.hidden_act),
            )
            for e in range(config.num_experts)
        ]
        router = read.linear(f"{prefix}.gate")
        return MixtureOfExperts(router, experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
