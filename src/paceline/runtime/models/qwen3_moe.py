"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.layers.mlp import MLP, MixtureOfExperts
from paceline.runtime.layers.parts import Parts
from paceline.runtime.models.decoder import dense_mlp
from paceline.runtime.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3 whose sparse layers route."""

    def mlp(self, parts: Parts, config: ModelConfig, layer: int) -> MLP:
        """The mixture of a layer, or its dense MLP."""
        prefix = f"model.layers.{layer}.mlp"
        if not config.is_moe_layer(layer):
            return dense_mlp(parts, config, prefix)
        experts = [dense_mlp(parts, config, f"{prefix}.experts.{e}") for e in range(config.num_experts)]
        router = parts.linear(f"{prefix}.gate")
        return MixtureOfExperts(router, experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
