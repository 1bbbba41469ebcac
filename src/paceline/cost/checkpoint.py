"""The dimensions of a model from what lies beside its weights: a Hugging Face config.json, or a GGUF header.

The names that families give to the same number differ; what a file leaves out has the default that transformers gives
to that family. What is not a transformer with keys and values in every layer is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.cost.encoders import encoder_kind
from paceline.cost.gguf_header import Header, read_header
from paceline.cost.model import Experts, Latent, Model
from paceline.cost.precision import find_precision
from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel

_MOST = 1 << 32  # no dimension of a model is larger
_MOST_OFF = 1.15  # a checkpoint's size over that of its dimensions, either way
# The same number under the names that families give it.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "expert_inter": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
}
_UNGATED = frozenset(
    {
        "opt",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "falcon",
        "bloom",
        "phi",
        "starcoder2",
        "mpt",
        "codegen",
        "xglm",
        "nemotron",
        "persimmon",
    }
)
_GATED = frozenset({"bitnet"})  # whatever their activation
_UNGATED_ACTIVATIONS = frozenset({"relu", "relu2", "xielu", "gelu", "gelu_new", "gelu_fast"})
_TIED = frozenset(
    {
        "opt",
        "gpt2",
        "gpt_bigcode",
        "falcon",
        "bloom",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "cohere",
        "cohere2",
        "mpt",
        "xglm",
    }
)
_PARALLEL = frozenset({"falcon", "gptj", "phi", "cohere", "cohere2", "codegen"})
_MULTI_QUERY = frozenset({"gpt_bigcode"})
# Windows: each is how many layers make one full one, where the file does not say it layer by layer.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "llama4_text": 4}
_HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3": 256, "gemma3_text": 256, "qwen3": 128, "qwen3_moe": 128}
# Words in the kinds of layers that we know. Indexed attention keeps all keys and reads some: ours is an upper bound.
_ATTENTION = ("full", "sliding", "chunked", "global", "local", "indexed")
_STATE = ("mamba", "rwkv", "jamba", "bamba", "falcon_h1", "zamba", "lfm2", "recurrent", "xlstm")  # in families
# Parts with weights or work of their own that are not in our dimensions.
_OTHER_PARTS = ("hidden_size_per_layer_input", "per_layer_config", "zero_expert_num")


def read_config(path: Path) -> Model:
    """The model of a config.json, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise CorruptModel(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CorruptModel(f"{file}: expected an object")
    model = from_config(raw, name=file.parent.name or file.stem, where=str(file))
    _check_size(file, raw, model)
    return model


def _check_size(file: Path, raw: Mapping[str, Any], model: Model) -> None:
    """Refuse dimensions that do not explain the checkpoint beside them, where it says how large it is.

    Not where weights are quantised (their scales and exceptions differ) or belong to more than a language model.
    """
    index = file.with_name("model.safetensors.index.json")
    if model.native not in ("bf16", "fp16", "fp32") or not index.is_file() or "vision_config" in raw:
        return
    try:
        total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        share = model.params * find_precision(model.native).bytes / total
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CorruptModel(f"{index}: no metadata.total_size in it: {error}") from error
    if not 1 / _MOST_OFF <= share <= _MOST_OFF:
        raise UnsupportedModel(
            f"{file}: its dimensions make {model.params / 1e9:.2f} B parameters, {share:.0%} of the "
            f"{total / 1e9:.2f} GB that {index.name} counts; there is more to this model than is modelled"
        )


def from_config(raw: Mapping[str, Any], *, name: str, where: str = "config.json") -> Model:
    """The model that a parsed config.json describes."""
    outer = raw
    for key in ("text_config", "language_config", "llm_config"):  # of a model that also sees or hears
        if isinstance(raw.get(key), Mapping):
            raw = raw[key]
    fields = _Fields(raw, where)
    family = str(raw.get("model_type", ""))
    _refuse_encoders(raw, outer, where)
    _refuse_others(raw, family, where)
    hidden, heads, layers = fields.need("hidden"), fields.need("heads"), fields.need("layers")
    kv_heads = fields.get("kv_heads", heads)
    if family in _MULTI_QUERY or (family == "falcon" and raw.get("multi_query", True)):
        kv_heads = kv_heads if raw.get("new_decoder_architecture") else 1
    if not kv_heads or heads % kv_heads:
        raise CorruptModel(f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    latent = _latent(raw, where)
    head_dim = fields.named("head_dim", _HEAD_DIMS.get(family, hidden // heads))
    experts = _experts(raw, fields, layers)
    window, window_layers = _window(raw, family, layers, where)
    tied = raw.get("tie_word_embeddings", outer.get("tie_word_embeddings", family in _TIED))
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=fields.get("ffn", 4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else head_dim,
        vocab=fields.need("vocab"),
        tied=bool(tied),
        gated=family in _GATED or (family not in _UNGATED and _activation(raw) not in _UNGATED_ACTIVATIONS),
        parallel=family in _PARALLEL,
        window=window,
        window_layers=window_layers,
        latent=latent,
        experts=experts,
        native=_native(outer, raw),
        max_context=fields.get("context", 0),
        sources={"dimensions": where},
    )


class _Fields:
    """Whole numbers under any of their names."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def named(self, key: str, default: int) -> int:
        """The number called `key`; what is missing or null is the default."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST or value % 1:
            raise CorruptModel(f"{self.where}: {key} is {value!r}, expected a whole number from 0 to {_MOST:,}")
        return int(value)

    def get(self, what: str, default: int) -> int:
        """The number under the first of its names that is there."""
        for key in _NAMES[what]:
            if self.raw.get(key) is not None:
                return self.named(key, default)
        return default

    def need(self, what: str) -> int:
        """The same, at least one; CorruptModel if it is not there."""
        value = self.get(what, 0)
        if value < 1:
            raise CorruptModel(f"{self.where}: {_NAMES[what][0]} is missing or 0")
        return value


def _refuse_encoders(raw: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> None:
    """What has an encoder has other costs: a prompt is seen from both sides, and keys of it are kept apart or not."""
    for config in (outer, raw):
        family = str(config.get("model_type", ""))
        kind = encoder_kind(family, two_sided=config.get("is_encoder_decoder") is True)
        if kind and config.get("is_decoder") is not True:
            raise UnsupportedModel(
                f"{where}: {family or 'the model'} is {kind}, which is not modelled; only decoders with attention are"
            )


def _refuse_others(raw: Mapping[str, Any], family: str, where: str) -> None:
    """What keeps a state in place of keys and values, or differs by layer, has other costs; we do not know them."""
    kinds = [str(kind) for kind in _listed(raw, "layer_types", where) or _listed(raw, "layers_block_type", where)]
    other = next((kind for kind in kinds if not any(word in kind for word in (*_ATTENTION, "attention"))), None)
    other = other or next((kind for kind in kinds if not any(word in kind for word in _ATTENTION)), None)
    if other is None and any(word in family for word in _STATE):
        other = family
    if other is not None:
        raise UnsupportedModel(
            f"{where}: layers of kind {other!r} are not modelled; only full and sliding attention are"
        )
    for key in _OTHER_PARTS:
        if raw.get(key):
            raise UnsupportedModel(f"{where}: {key} is {raw[key]!r}, which is not modelled")
    for key, value in raw.items():
        if (
            isinstance(value, list)
            and key in ("intermediate_size", "num_attention_heads_per_layer")
            and len(set(value)) > 1
        ):
            raise UnsupportedModel(f"{where}: {key} differs by layer, which is not modelled")


def _listed(raw: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """The list called `key`; empty if it is missing or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, list):
        raise CorruptModel(f"{where}: {key} is {value!r}, expected a list")
    return value or []


def _activation(raw: Mapping[str, Any]) -> str:
    return str(raw.get("hidden_act") or raw.get("activation_function") or "")


def _latent(raw: Mapping[str, Any], where: str) -> Latent | None:
    if not raw.get("kv_lora_rank"):
        return None
    fields = _Fields(raw, where)
    return Latent(
        kv_rank=fields.named("kv_lora_rank", 0),
        rope_dim=fields.named("qk_rope_head_dim", 64),
        q_rank=fields.named("q_lora_rank", 0),
        nope_dim=fields.named("qk_nope_head_dim", 128),
        value_dim=fields.named("v_head_dim", 128),
    )


def _experts(raw: Mapping[str, Any], fields: _Fields, layers: int) -> Experts | None:
    count = fields.get("experts", 0)
    if count <= 1:
        return None
    inter = fields.get("expert_inter", fields.named("intermediate_size", 0))
    # Llama 4 has one shared expert, which its config takes for granted; the width of its plain MLPs has another name.
    alone = 1 if "intermediate_size_mlp" in raw else 0
    shared = fields.named("shared_expert_intermediate_size", inter * fields.get("shared", alone))
    step = max(1, fields.named("decoder_sparse_step", 1), fields.named("interleave_moe_layer_step", 1))
    plain, kinds = (_listed(raw, key, fields.where) for key in ("mlp_only_layers", "mlp_layer_types"))
    dense = kinds.count("dense") if kinds else fields.get("dense", 0)
    if not dense:
        dense = sum((layer + 1) % step != 0 or layer in plain for layer in range(layers))
    active = fields.get("active", 1)
    if not 1 <= active <= count:
        raise CorruptModel(
            f"{fields.where}: a token chooses {active} of {count} experts; that must be from 1 to {count}"
        )
    return Experts(count, active, inter, shared, min(dense, layers))


def _window(raw: Mapping[str, Any], family: str, layers: int, where: str) -> tuple[int, int]:
    """(keys a query sees, how many layers see no more)."""
    window = _Fields(raw, where).named("sliding_window", 0)
    if not window or (raw.get("use_sliding_window") is False):
        return 0, 0
    kinds = _listed(raw, "layer_types", where)
    if kinds:
        if len(kinds) != layers:
            raise CorruptModel(f"{where}: layer_types names {len(kinds)} layers of {layers}")
        count = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
        return (window, count) if count else (0, 0)
    if family.startswith("qwen"):
        if not raw.get("use_sliding_window"):
            return 0, 0
        return window, max(0, layers - _Fields(raw, where).named("max_window_layers", layers))
    pattern = _Fields(raw, where).named("sliding_window_pattern", _PATTERNS.get(family, 0))
    return window, layers - layers // pattern if pattern else layers


def _native(outer: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """The precision of the weights, by a name that `find_precision` knows."""
    quantized = outer.get("quantization_config") or raw.get("quantization_config")
    if isinstance(quantized, Mapping):
        method = str(quantized.get("quant_method", ""))
        if method in ("fp8", "mxfp4"):
            return method
        if method == "modelopt" or "quant_algo" in quantized:
            return "nvfp4" if "FP4" in str(quantized.get("quant_algo", "")).upper() else "fp8"
        bits, kind = quantized.get("bits"), ""
        groups = quantized.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            bits, kind = weights.get("num_bits", bits), str(weights.get("type", ""))
            if weights.get("num_bits") == 8 and group.get("input_activations") is None:
                return "w8a16"
        if quantized.get("load_in_4bit"):
            bits = 4
        if bits == 8:
            return "fp8" if kind == "float" else "int8"
        if bits == 4:
            return "nvfp4" if kind == "float" else "int4"
        if isinstance(bits, (int, float)) and 0 < bits < 16:
            return f"{bits}bit"
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype") or "")
    return {"float32": "fp32", "float16": "fp16"}.get(dtype.removeprefix("torch."), "bf16")


def read_gguf(path: Path) -> Model:
    """The model of a GGUF file, from its header alone; its precision is the bits that its tensors really take."""
    return from_header(read_header(path), name=path.stem)


def from_header(header: Header, *, name: str) -> Model:
    """The model that a GGUF header describes."""
    arch = str(header.metadata.get("general.architecture", ""))
    stateful = any(word in name for name in header.shapes for word in (".ssm_", ".shortconv", ".time_mix"))
    if stateful or any(word in arch for word in _STATE) or encoder_kind(arch):
        raise UnsupportedModel(
            f"{header.path}: architecture {arch!r} is not modelled; only decoders with attention are"
        )
    own = {key.removeprefix(f"{arch}."): value for key, value in header.metadata.items()}
    fields = _Fields({key: _largest(value) for key, value in own.items()}, str(header.path))
    need = {key: fields.named(key, 0) for key in ("block_count", "embedding_length", "attention.head_count")}
    for key, value in need.items():
        if value < 1:
            raise CorruptModel(f"{header.path}: {arch}.{key} is missing or 0")
    layers, hidden, heads = need.values()
    vocab = header.rows("token_embd.weight") or fields.named("vocab_size", 0)
    if not vocab:
        raise CorruptModel(f"{header.path}: no token_embd.weight, so the size of the vocabulary is not known")
    ffn = fields.named("feed_forward_length", 4 * hidden)
    latent = _gguf_latent(fields)
    window = fields.named("attention.sliding_window", 0)
    pattern = _PATTERNS.get(arch.replace("-", "_"), 0)
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=heads if latent else fields.named("attention.head_count_kv", heads),
        head_dim=latent.nope_dim + latent.rope_dim if latent else fields.named("attention.key_length", hidden // heads),
        vocab=vocab,
        tied=not header.rows("output.weight"),
        gated="blk.0.ffn_gate.weight" in header.shapes or any("ffn_gate" in key for key in header.shapes),
        window=window,
        window_layers=(layers - layers // pattern if pattern else layers) if window else 0,
        latent=latent,
        experts=_gguf_experts(fields, ffn),
        native=f"{header.bits_per_weight}bit",
        max_context=fields.named("context_length", 0),
        sources={"dimensions": str(header.path)},
    )


def _largest(value: Any) -> Any:
    """Some files give a number for each layer; a model's memory is that of the largest."""
    if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
        return max(value)
    return value


def _gguf_latent(fields: _Fields) -> Latent | None:
    rank = fields.named("attention.kv_lora_rank", 0)
    if not rank:
        return None
    rope = fields.named("rope.dimension_count", 64)
    key = fields.named("attention.key_length_mla", fields.named("attention.key_length", 128 + rope))
    value = fields.named("attention.value_length_mla", fields.named("attention.value_length", 128))
    return Latent(rank, rope, fields.named("attention.q_lora_rank", 0), key - rope, value)


def _gguf_experts(fields: _Fields, ffn: int) -> Experts | None:
    count = fields.named("expert_count", 0)
    if count <= 1:
        return None
    inter = fields.named("expert_feed_forward_length", ffn)
    shared = fields.named("expert_shared_feed_forward_length", inter * fields.named("expert_shared_count", 0))
    dense = fields.named("leading_dense_block_count", 0)
    return Experts(count, fields.named("expert_used_count", 1), inter, shared, dense)
