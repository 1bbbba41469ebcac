"""Checkpoint tensors by name, and the check that a checkpoint holds what its config promises."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.runtime.formats.config import ModelConfig


class CheckpointWeights(Mapping[str, Tensor]):
    """Tensors by Hugging Face name, each read when it is looked up.

    Floating-point tensors come in the dtype the weights were opened with. A looked-up tensor owns its memory: nothing
    that happens to the file later reaches it. Nothing is kept here, so the peak is the model plus one tensor.
    """

    where: str  # file or folder, for errors

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. KeyError if there is none of that name."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""


def check_weights(weights: CheckpointWeights, config: ModelConfig) -> None:
    """Raise unless the weights are exactly what a native model of this config reads.

    A missing tensor or a wrong shape is a CorruptModel. A tensor of the decoder that the family has no use for is an
    UnsupportedModel: leaving it out would give a model that runs and answers wrongly.
    """
    expected = dict(expected_shapes(config))
    for name, shape in expected.items():
        if name not in weights:
            raise CorruptModel(f"{weights.where}: tensor {name} is missing")
        if weights.shape(name) != shape:
            raise CorruptModel(
                f"{weights.where}: tensor {name} has shape {list(weights.shape(name))}, "
                f"the config asks for {list(shape)}"
            )
    for name in weights:
        known = name in expected or name.endswith(".rotary_emb.inv_freq")
        if name.startswith("model.") and not known:
            raise UnsupportedModel(f"{weights.where}: {config.architecture} has no use for tensor {name}")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor a native model of this config reads, in Hugging Face's layout on disk."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (*_attention_shapes(config), *_mlp_shapes(config, layer)):
            yield prefix + name, shape


def _attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Norms and attention of one layer."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"self_attn.{name}.weight", (size, hidden)
        if config.attention_bias:
            yield f"self_attn.{name}.bias", (size,)
    yield "self_attn.o_proj.weight", (hidden, q_size)
    if config.attention_out_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if config.model_type in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


def _mlp_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dense MLP of one layer, or its router and experts."""
    hidden = config.hidden_size
    if not config.is_moe_layer(layer):
        width = config.intermediate_size
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            yield f"mlp.{name}.weight", shape
            if config.mlp_bias:
                yield f"mlp.{name}.bias", shape[:1]
        return
    block, (gate, down, up) = expert_names(config.model_type)
    width = config.moe_intermediate_size
    yield f"{block}.gate.weight", (config.num_experts, hidden)
    for expert in range(config.num_experts):
        yield f"{block}.experts.{expert}.{gate}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{up}.weight", (width, hidden)
        yield f"{block}.experts.{expert}.{down}.weight", (hidden, width)


def expert_names(model_type: str) -> tuple[str, tuple[str, str, str]]:
    """(the block's name, the names of an expert's gate, down and up projections) in a family's checkpoints."""
    if model_type == "mixtral":
        return "block_sparse_moe", ("w1", "w2", "w3")
    return "mlp", ("gate_proj", "down_proj", "up_proj")


def own_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in memory of its own, converted when it is floating-point."""
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
