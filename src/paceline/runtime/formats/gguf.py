"""A GGUF file as a native model: its metadata as a ModelConfig, its tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.runtime.formats.config import MOST_LAYERS, ModelConfig, RopeConfig
from paceline.runtime.formats.gguf_file import GGUFFile
from paceline.runtime.formats.weights import CheckpointWeights, expected_shapes, expert_names

# general.architecture -> (Hugging Face class, model_type); a "llama" with experts is a Mixtral.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
# Ids that end a turn or a text; a file has one or several.
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Tokens that end a turn where a chat template writes them, though a file may name another as its end of text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a Hugging Face tensor lies in the file."""

    name: str
    expert: int | None = None  # an index into the first axis of stacked experts
    heads: int | None = None  # rows are interleaved for this many heads


class GGUFWeights(CheckpointWeights):
    """The tensors of a GGUF file under the names and in the row order of Hugging Face.

    llama.cpp stores the query and key rows of "llama" files so that rotary pairs are neighbours; they are put back as
    halves here, before dequantization, since rows are independent in every tensor type.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> None:
        self.where = str(file.path)
        self.dtype = dtype
        self._file = file
        file.require_supported()
        interleaved = file.metadata.get("general.architecture") == "llama"
        sources = {name: _source(name, config, interleaved) for name, _ in expected_shapes(config)}
        self._sources = {name: source for name, source in sources.items() if source.name in file.tensors}
        used = {source.name for source in self._sources.values()} | {ROPE_FACTORS}
        unused = sorted(name for name in file.tensors if name not in used)
        if unused:
            raise UnsupportedModel(f"{file.path}: {config.architecture} has no use for tensor {unused[0]}")

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        entry = self._file.tensors[source.name]
        if source.heads is not None:
            return self._file.read(source.name, self.dtype, _halves_order(entry.shape[0], source.heads))
        return self._file.read(source.name, self.dtype, index=source.expert)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.tensors[source.name].shape
        return shape if source.expert is None else shape[1:]

    def close(self) -> None:
        self._sources.clear()


def _source(name: str, config: ModelConfig, interleaved: bool) -> _Source:
    """Where the tensor that Hugging Face calls `name` lies."""
    if name in _TOP_NAMES:
        return _Source(_TOP_NAMES[name])
    _, _, layer, rest = name.split(".", 3)
    stem, _, suffix = rest.rpartition(".")
    block, projections = expert_names(config.model_type)
    if stem == f"{block}.gate":
        return _Source(f"blk.{layer}.ffn_gate_inp.{suffix}")
    if stem.startswith(f"{block}.experts."):
        _, _, tail = stem.partition(".experts.")
        expert, _, projection = tail.partition(".")
        kind = ("gate", "down", "up")[projections.index(projection)]
        return _Source(f"blk.{layer}.ffn_{kind}_exps.{suffix}", expert=int(expert))
    heads = None
    if interleaved and stem == "self_attn.q_proj":
        heads = config.num_attention_heads
    elif interleaved and stem == "self_attn.k_proj":
        heads = config.num_key_value_heads
    return _Source(f"blk.{layer}.{_LAYER_NAMES[stem]}.{suffix}", heads=heads)


def _halves_order(rows: int, heads: int) -> NDArray[np.int64]:
    """For each row in Hugging Face's order (first halves of the pairs, then second ones), its row in the file."""
    return np.arange(rows, dtype=np.int64).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config of a native family; UnsupportedModel for other architectures, CorruptModel for what is missing."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {arch!r} is not read (known: {', '.join(ARCHITECTURES)}); "
            f"use the model's Hugging Face folder instead"
        )
    architecture, model_type = ARCHITECTURES[arch]
    meta = _Metadata(file, arch)
    experts = meta.count("expert_count", 0)
    if arch == "llama" and experts:
        architecture, model_type = "MixtralForCausalLM", "mixtral"
    hidden, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    layers, context = meta.count("block_count"), meta.count("context_length")
    if layers > MOST_LAYERS:
        raise CorruptModel(f"{file.path}: block_count is {layers}, more than any model has")
    head_dim = meta.count("attention.key_length", meta.count("rope.dimension_count", hidden // heads))
    window = meta.count("attention.sliding_window", 0) if arch == "llama" else 0
    width = meta.count("feed_forward_length", 0) or meta.count("expert_feed_forward_length")
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=_vocab_size(file, meta),
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=meta.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=meta.real("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope=_rope(file, meta, head_dim, context),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        sliding_window=window or None,
        layer_types=("sliding_attention" if window else "full_attention",) * layers,
        num_experts=experts,
        num_experts_per_tok=meta.count("expert_used_count", 0),
        moe_intermediate_size=meta.count("expert_feed_forward_length", width) if experts else 0,
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Every id that ends a text or a turn."""
    ids = [int(file.metadata[key]) for key in _EOS_KEYS if key in file.metadata]
    template = str(file.metadata.get("tokenizer.chat_template", ""))
    tokens = file.metadata.get("tokenizer.ggml.tokens") or ()
    known = {tokens[i] for i in ids if i < len(tokens)}
    wanted = {text for text in _TURN_ENDS if text in template} - known
    if wanted:  # only then is the whole vocabulary looked at
        ids += [i for i, token in enumerate(tokens) if token in wanted]
    return tuple(dict.fromkeys(ids))


class _Metadata:
    """Typed reads of the architecture's own keys."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._values: Mapping[str, Any] = file.metadata
        self._path = file.path
        self._arch = arch

    def get(self, key: str) -> Any:
        return self._values.get(f"{self._arch}.{key}")

    def _number(self, key: str, default: float | None) -> float:
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some writers give one entry a layer
        if isinstance(value, list):
            raise UnsupportedModel(f"{self._path}: {self._arch}.{key} differs by layer, which is not read")
        if value is None and default is None:
            raise CorruptModel(f"{self._path}: {self._arch}.{key} is missing")
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptModel(f"{self._path}: {self._arch}.{key} is {value!r}, not a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A count; positive where there is no default."""
        value = int(self._number(key, default))
        if value < 0 or (default is None and value == 0):
            raise CorruptModel(f"{self._path}: {self._arch}.{key} is {value}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default))


def _vocab_size(file: GGUFFile, meta: _Metadata) -> int:
    """Rows of the embedding, which is what logits have; metadata may leave the number out."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModel(f"{file.path}: tensor token_embd.weight is missing")
    return meta.count("vocab_size", embedding.shape[0])


def _rope(file: GGUFFile, meta: _Metadata, head_dim: int, context: int) -> RopeConfig:
    """Rotary parameters. llama3's scaling comes as a tensor of divisors, the other kinds as metadata."""
    rope = RopeConfig(
        rope_theta=meta.real("rope.freq_base", 10_000.0),
        partial_rotary_factor=meta.count("rope.dimension_count", head_dim) / head_dim,
        original_max_position_embeddings=meta.count("rope.scaling.original_context_length", context),
    )
    kind = meta.get("rope.scaling.type") or "none"
    if ROPE_FACTORS in file.tensors:
        divisors = file.read(ROPE_FACTORS, torch.float32)
        return replace(rope, freq_divisors=tuple(divisors.tolist()))
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path}: rope scaling {kind!r} is not read (known: none, linear, yarn)")
    factor = meta.real("rope.scaling.factor")
    if kind == "linear":
        return replace(rope, rope_type="linear", factor=factor)
    return replace(
        rope,
        rope_type="yarn",
        factor=factor,
        beta_fast=meta.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.real("rope.scaling.yarn_beta_slow", 1.0),
    )


def open_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, GGUFWeights]:
    """Config and weights of a GGUF file; errors as config_from_gguf and GGUFFile raise them."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    return config, GGUFWeights(file, config, dtype)
