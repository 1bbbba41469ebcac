"""What a native model must know about a checkpoint, read from config.json or from GGUF metadata.

Field names are Hugging Face's, so that a reader can compare a model file with its config.json. Values that a
config.json leaves out have the defaults that transformers gives to that family (`_FAMILIES`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel

_MOST_NUMBER = 1e30
MOST_LAYERS = 4096  # so that a damaged count cannot ask for all memory


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, as `rope_parameters` (or the older `rope_theta` and `rope_scaling`) describe it.

    `rope_type` is "default", "linear", "dynamic", "yarn", "llama3", or whatever the file says: `layers.rope` refuses
    what it does not know. None means "derive it", as each variant defines.
    """

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    factor: float | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None  # yarn: multiplies cos and sin
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    # One divisor per frequency, as GGUF's `rope_freqs.weight` gives it; () is none. Applied to the default type.
    freq_divisors: tuple[float, ...] = ()
    # The longest context that will be served, where that differs from the checkpoint's own. Set by the loader; dynamic
    # NTK alone depends on it (see layers.rope).
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only checkpoint. Sizes are counts, not bytes."""

    architecture: str  # the Hugging Face class name, such as "LlamaForCausalLM"
    model_type: str  # the Hugging Face family, such as "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense MLP
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the q, k and v projections
    attention_out_bias: bool = False  # of the o projection
    mlp_bias: bool = False
    sliding_window: int | None = None  # keys a query sees, itself included; of the layers that slide
    layer_types: tuple[str, ...] = ()  # "full_attention" or "sliding_attention", one a layer
    # Mixture of experts; num_experts 0 is a dense model.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str | None = None  # the dtype the checkpoint names: "bfloat16", "float16", "float32" or None

    def layer_window(self, layer: int) -> int | None:
        """Keys that a query of `layer` sees, itself included; None is all of them."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and sparse and layer not in self.mlp_only_layers


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of one family, and where its features are switched on."""

    architecture: str
    num_key_value_heads: int | None = None  # None: as many as attention heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    rope_theta: float = 10_000.0
    sliding_window: int | None = None
    # "all": every layer slides when the window is set; "flag": only with use_sliding_window, from max_window_layers on
    # (or as layer_types says); "flag_all": every layer, with the flag; "none": never.
    sliding: str = "none"
    experts_key: str = ""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None  # None: intermediate_size
    norm_topk_prob: bool = True
    eos_token_id: int | None = None


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", max_position_embeddings=2048, eos_token_id=2),
    "mistral": _Family(
        "MistralForCausalLM",
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        sliding_window=4096,
        sliding="all",
        eos_token_id=2,
    ),
    "qwen2": _Family("Qwen2ForCausalLM", num_key_value_heads=32, sliding_window=4096, sliding="flag"),
    "qwen3": _Family("Qwen3ForCausalLM", num_key_value_heads=32, head_dim=128, sliding_window=4096, sliding="flag"),
    "mixtral": _Family(
        "MixtralForCausalLM",
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        sliding="all",
        experts_key="num_local_experts",
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=2,
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        num_key_value_heads=4,
        sliding_window=4096,
        sliding="flag_all",
        experts_key="num_experts",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
    ),
}


class Fields:
    """Typed reads from a parsed config.json; what is missing or of a wrong type is named in the error."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def _wrong(self, key: str, value: object, wanted: str) -> CorruptModel:
        return CorruptModel(f"{self.where}: {key} is {value!r}, expected {wanted}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`. Without a default the key must be there."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise CorruptModel(f"{self.where}: {key} is missing")
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value != int(value) or value < minimum:
            raise self._wrong(key, value, f"an integer of at least {minimum}")
        return int(value)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive integer or None; a null in the file is None, a key left out is the default."""
        return default if key not in self.raw else (None if self.raw[key] is None else self.integer(key))

    def number(self, key: str, default: float | None) -> float:
        """A number. Without a default the key must be there."""
        value = self.optional_number(key)
        if value is not None:
            return value
        if default is None:
            raise CorruptModel(f"{self.where}: {key} is missing")
        return default

    def optional_number(self, key: str) -> float | None:
        """A number, or None where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        if not -_MOST_NUMBER < value < _MOST_NUMBER:
            raise self._wrong(key, value, "a number of a size that makes sense")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; absent or null is the default."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value


def token_ids(value: object) -> tuple[int, ...]:
    """Ids from an `eos_token_id` field, which is an integer, a list of integers or null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(item for item in value if isinstance(item, int) and not isinstance(item, bool))
    return ()


def is_native_config(raw: Mapping[str, Any]) -> bool:
    """Whether `config_from_hf` knows this family and its causal language model head."""
    family = _FAMILIES.get(str(raw.get("model_type")))
    return family is not None and family.architecture in (raw.get("architectures") or [family.architecture])


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The config of one of the native families.

    `where` names the file in errors. Raises UnsupportedModel for other families, CorruptModel for fields that are
    missing or of the wrong type.
    """
    fields = Fields(raw, where)
    model_type = str(raw.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None or not is_native_config(raw):
        raise UnsupportedModel(f"{where}: {raw.get('architectures') or model_type!r} has no native implementation")
    layers = fields.integer("num_hidden_layers")
    if layers > MOST_LAYERS:  # before anything is laid out for each of them
        raise CorruptModel(f"{where}: num_hidden_layers is {layers}, more than any model has")
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    window, layer_types = _sliding(fields, family, layers)
    # transformers 5 writes every family's count of experts under the name that only Mixtral had before.
    experts_key = "num_local_experts" if "num_local_experts" in raw else family.experts_key
    experts = fields.integer(experts_key, family.num_experts, minimum=0) if family.experts_key else 0
    intermediate = fields.integer("intermediate_size")
    kv_heads = fields.optional_integer("num_key_value_heads", family.num_key_value_heads) or heads
    if heads % kv_heads:
        raise CorruptModel(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    attention_bias = fields.flag("attention_bias", False) and model_type in ("llama", "qwen3", "qwen3_moe")
    return ModelConfig(
        architecture=family.architecture,
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=fields.optional_integer("head_dim", family.head_dim) or hidden // heads,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=max_positions,
        rope=rope_from_hf(raw, max_positions, default_theta=family.rope_theta, where=where),
        hidden_act=str(raw.get("hidden_act", "silu")),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias or model_type == "qwen2",  # Qwen2 has these biases without saying so
        attention_out_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) and model_type == "llama",
        sliding_window=window,
        layer_types=layer_types,
        num_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", family.num_experts_per_tok) if experts else 0,
        moe_intermediate_size=_moe_intermediate(fields, family, intermediate) if experts else 0,
        norm_topk_prob=fields.flag("norm_topk_prob", family.norm_topk_prob) or model_type == "mixtral",
        decoder_sparse_step=fields.integer("decoder_sparse_step", 1) if model_type == "qwen3_moe" else 1,
        mlp_only_layers=tuple(raw.get("mlp_only_layers") or ()) if model_type == "qwen3_moe" else (),
        eos_token_ids=token_ids(raw.get("eos_token_id", family.eos_token_id)),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"))), None),
        torch_dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )


def _moe_intermediate(fields: Fields, family: _Family, intermediate: int) -> int:
    """Width of one expert: Mixtral's experts are as wide as its config's MLP, Qwen3-MoE has a field of its own."""
    if family.moe_intermediate_size is None:
        return intermediate
    return fields.integer("moe_intermediate_size", family.moe_intermediate_size)


def _sliding(fields: Fields, family: _Family, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """(window or None, one layer type for each layer)."""
    window = fields.optional_integer("sliding_window", family.sliding_window)
    full = ("full_attention",) * layers
    if family.sliding == "none":
        return None, full
    if family.sliding.startswith("flag") and not fields.flag("use_sliding_window", False):
        window = None
    given = fields.raw.get("layer_types")
    if family.sliding == "flag" and given is not None:
        if len(given) != layers:
            raise CorruptModel(f"{fields.where}: {len(given)} layer_types for num_hidden_layers {layers}")
        return window, tuple(str(kind) for kind in given)
    if window is None:
        return None, full
    first = fields.integer("max_window_layers", 28, minimum=0) if family.sliding == "flag" else 0
    return window, tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))


def rope_from_hf(
    raw: Mapping[str, Any], max_positions: int, *, default_theta: float = 10_000.0, where: str = "config.json"
) -> RopeConfig:
    """Rotary parameters from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it)."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise CorruptModel(f"{where}: rope parameters are {table!r}, expected an object")
    given = dict(table)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel(f"{where}: rope parameters that differ by layer type have no native implementation")
    given.setdefault("rope_theta", raw.get("rope_theta") or default_theta)
    fields = Fields(given, f"{where}: rope_parameters")
    rope_type = str(given.get("rope_type", given.get("type", "default")))
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    factor = fields.optional_number("factor")
    if factor is None and rope_type in ("linear", "dynamic", "llama3"):
        raise CorruptModel(f"{where}: rope type {rope_type!r} needs a factor")
    if factor is not None and not factor > 0:
        raise CorruptModel(f"{where}: rope factor is {factor:g}, expected a number above 0")
    return RopeConfig(
        rope_theta=fields.number("rope_theta", default_theta),
        rope_type=rope_type,
        factor=factor,
        partial_rotary_factor=1.0 if partial is None else float(partial),
        original_max_position_embeddings=int(original) if original else max_positions,
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.optional_number("beta_fast"),
        beta_slow=fields.optional_number("beta_slow"),
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
        low_freq_factor=fields.optional_number("low_freq_factor"),
        high_freq_factor=fields.optional_number("high_freq_factor"),
    )
