"""Which file runs which architecture. A new family is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from paceline.runtime.formats.config import ModelConfig
from paceline.runtime.layers.parts import Parts
from paceline.runtime.models.base import Model

# Hugging Face class name in config.json's "architectures" -> "module:class" of ours, imported when first used.
NATIVE: dict[str, str] = {
    "LlamaForCausalLM": "paceline.runtime.models.llama:Llama",
    "MistralForCausalLM": "paceline.runtime.models.mistral:Mistral",
    "MixtralForCausalLM": "paceline.runtime.models.mixtral:Mixtral",
    "Qwen2ForCausalLM": "paceline.runtime.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "paceline.runtime.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "paceline.runtime.models.qwen3_moe:Qwen3Moe",
}


class ModelFactory(Protocol):
    """How the loader builds a model: tensors are looked up by name, converted and laid out once, here."""

    def __call__(self, config: ModelConfig, parts: Parts) -> Model: ...


def native_model(architecture: str) -> ModelFactory | None:
    """The factory of a native family; None where the architecture has no file of its own."""
    where = NATIVE.get(architecture)
    if where is None:
        return None
    module, _, name = where.partition(":")
    factory: ModelFactory = getattr(import_module(module), name)
    return factory
