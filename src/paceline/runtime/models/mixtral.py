"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.layers.mlp import MLP, MixtureOfExperts
from paceline.runtime.layers.parts import Parts
from paceline.runtime.models.decoder import Decoder


class Mixtral(Decoder):
    """The decoder with experts w1 (gate), w3 (up) and w2 (down)."""

    def mlp(self, parts: Parts, config: ModelConfig, layer: int) -> MLP:
        """The mixture of a layer."""
        prefix = f"model.layers.{layer}.block_sparse_moe"
        each = [f"{prefix}.experts.{e}" for e in range(config.num_experts)]
        experts = [parts.gated_mlp((f"{e}.w1", f"{e}.w3", f"{e}.w2"), config.hidden_act) for e in each]
        router = parts.linear(f"{prefix}.gate")
        return MixtureOfExperts(router, experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
