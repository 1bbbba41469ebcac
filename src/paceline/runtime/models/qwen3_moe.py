"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.layers.mlp import MixtureOfExperts
from paceline.runtime.models.decoder import MLP, Reader, dense_mlp
from paceline.runtime.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3 whose sparse layers route."""

    def mlp(self, read: Reader, config: ModelConfig, layer: int) -> MLP:
        """The mixture of a layer, or its dense MLP."""
        prefix = f"model.layers.{layer}.mlp"
        if not config.is_moe_layer(layer):
            return dense_mlp(read, config, prefix)
        experts = [dense_mlp(read, config, f"{prefix}.experts.{e}") for e in range(config.num_experts)]
        router = read.linear(f"{prefix}.gate")
        return MixtureOfExperts(router, experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
