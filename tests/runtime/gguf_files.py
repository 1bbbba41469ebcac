"""GGUF files for tests: tiny models written as llama.cpp's converter would, in any tensor type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

# K-quant blocks hold 256 values, so rows are that long.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe", "mixtral": "Mixtral"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def reference_model(arch: str, **changes: Any) -> Any:
    """A random transformers model of a GGUF architecture ("mixtral" is a "llama" with experts)."""
    torch.manual_seed(11)
    family = CLASSES[arch]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + torch.randn_like(parameter) * 0.2 if parameter.ndim == 1 else parameter * 3)
    return model


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, NDArray[Any]] | None = None,
) -> None:
    """Write `model` with its matrices in `kind` and its vectors in float32. K-quants get random blocks."""
    name = "llama" if arch == "mixtral" else arch
    writer = GGUFWriter(path, name)
    _write_metadata(writer, model.config, **(metadata or {}))
    generator = np.random.default_rng(5)
    for tensor_name, tensor in (*_tensors(model, arch).items(), *(extra or {}).items()):
        if tensor.ndim == 1 or tensor_name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(tensor_name, tensor)
        else:
            data = encode(tensor, kind, generator)
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: GGUFWriter, config: Any, **metadata: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    if getattr(config, "num_local_experts", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        if isinstance(value, int):
            add = writer.add_uint32
        if isinstance(value, list):
            add = writer.add_array
        add(key, value)


def _tensors(model: Any, arch: str) -> dict[str, NDArray[Any]]:
    """The model's tensors under llama.cpp's names, queries and keys of llama files interleaved."""
    found = {}
    for full_name, tensor in model.state_dict().items():
        if full_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in full_name:
            found.update(_experts(full_name, tensor))
            continue
        stem, _, suffix = full_name.rpartition(".")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        if arch in ("llama", "mixtral") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = model.config.num_attention_heads if "q_proj" in stem else model.config.num_key_value_heads
            tensor = interleave(tensor, heads)
        found[f"{layer}{NAMES[stem]}.{suffix}"] = tensor.float().numpy()
    return found


def _experts(name: str, tensor: Tensor) -> dict[str, NDArray[Any]]:
    """Stacked experts: gate and up are one tensor in transformers, two in a file."""
    layer = name.split(".")[2]
    if name.endswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": tensor.numpy()}
    gate, up = tensor.chunk(2, dim=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate.numpy(), f"blk.{layer}.ffn_up_exps.weight": up.numpy()}


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head so that the two of a rotary pair are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def encode(values: NDArray[Any], kind: GGMLQuantizationType, generator: np.random.Generator) -> NDArray[Any]:
    """Bytes (or floats) of `values` in a tensor type; the package cannot quantize to K types, so those are random."""
    if kind.name.endswith("_K"):
        return random_blocks(values.shape, kind, generator)
    return np.ascontiguousarray(quantize(np.ascontiguousarray(values), kind))


def random_blocks(
    shape: tuple[int, ...], kind: GGMLQuantizationType, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Valid blocks of a K type: every byte random but the float16 scales, which keep weights of a usual size."""
    values, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (int(np.prod(shape)) // values, size), dtype=np.uint8)
    # Where each type has its float16 scales.
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for place in places:
        scales = generator.uniform(1e-5, 6e-5, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], shape[-1] // values * size)
