"""Models read from config.json and GGUF headers, against parameters that transformers and the files really have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost.catalogue import find_model
from paceline.cost.checkpoint import _NAMES, from_config, read_config, read_gguf
from paceline.cost.model import Model
from paceline.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from tests.runtime.gguf_files import reference_model, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
# Families by their transformers name, with what is theirs. Vectors (norms, biases) and positions are not counted by
# ours beyond two norms a layer: the sizes above keep them below 1 %.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 64},
    "Qwen2": {},
    "Qwen3": {"head_dim": 64},
    "Gemma": {"head_dim": 64},
    "Gemma2": {"head_dim": 64},
    "Gemma3Text": {"head_dim": 64},
    "Phi3": {},
    "Granite": {},
    "Starcoder2": {},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {**MOE, "head_dim": 64},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "Cohere": {},
    "Apertus": {},
    "BitNet": {},
    "Arcee": {},
    "Glm4MoeLite": {
        **MOE,
        "n_routed_experts": 8,
        "kv_lora_rank": 128,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 256, "moe_layer_end_index": 5},
    "Llama4Text": {"num_local_experts": 4, "head_dim": 64, "intermediate_size_mlp": 1024, "intermediate_size": 512},
    "OPT": {"ffn_dim": 1536, "word_embed_proj_dim": 512, "num_key_value_heads": None, "intermediate_size": None},
    "Falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "GPTNeoX": {"num_key_value_heads": None},
    "DeepseekV3": {
        **MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 8,
    },
}


def parameters(name: str, config: Any) -> int:
    """How many the real model has, tied ones once."""
    stem = {"Gemma3Text": "Gemma3", "Llama4Text": "Llama4"}.get(name, name)
    with torch.device("meta"):
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_a_config(name: str, tmp_path: Path) -> None:
    given = {key: value for key, value in {**SIZES, **FAMILIES[name]}.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**given)
    config.save_pretrained(tmp_path)
    model = find_model(str(tmp_path))
    # An odd number of outputs where biases are many; OPT also has a table of positions.
    tolerance = 0.03 if name == "OPT" else 0.012
    assert model.params == pytest.approx(parameters(name, config), rel=tolerance)
    assert model.max_context == config.max_position_embeddings


def published(**changes: Any) -> dict[str, Any]:
    """A config.json as the hub has it: Llama-3-8B."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }
    return {**raw, **changes}


def dims(model: Model) -> dict[str, Any]:
    kept = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "gated", "native", "window")
    return {key: getattr(model, key) for key in kept}


def test_a_published_config_is_the_catalogue_entry() -> None:
    assert dims(from_config(published(), name="x")) == dims(find_model("llama-3-8b"))


def test_a_model_that_also_sees() -> None:
    raw = {"model_type": "llava", "text_config": published(), "vision_config": {"hidden_size": 1}}
    assert from_config(raw, name="x").params == find_model("llama-3-8b").params


def test_windows() -> None:
    slides = from_config(published(model_type="mistral", sliding_window=4096), name="x")
    assert (slides.window, slides.window_layers) == (4096, 32)
    off = from_config(published(model_type="qwen2", sliding_window=4096, use_sliding_window=False), name="x")
    assert (off.window, off.window_layers) == (0, 0)
    raw = published(model_type="gemma3_text", num_hidden_layers=62, sliding_window=1024, head_dim=128)
    assert from_config(raw, name="x").window_layers == 52
    kinds = ["sliding_attention", "full_attention"] * 16
    assert from_config(published(sliding_window=128, layer_types=kinds), name="x").window_layers == 16


@pytest.mark.parametrize(
    ("quantization", "native"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": 3}, "3bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {}}},
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}},
            },
            "int4",
        ),
    ],
)
def test_quantized_checkpoints(quantization: dict[str, Any], native: str) -> None:
    assert from_config(published(quantization_config=quantization), name="x").native == native


def test_precision_of_plain_checkpoints() -> None:
    assert from_config(published(torch_dtype="float32"), name="x").native == "fp32"
    assert from_config(published(torch_dtype=None, dtype="float16"), name="x").native == "fp16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is missing or 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_attention_heads": "many"}, "'many', expected a whole number"),
        ({"num_hidden_layers": 10**12}, "expected a whole number from 0 to"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "a token chooses 8 of 4 experts"),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, "names 3 layers of 32"),
    ],
)
def test_damaged_configs_are_told_where(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(**changes)), encoding="utf-8")
    with pytest.raises(CorruptModel, match=message):
        read_config(tmp_path)


WORDS = [
    *(name for names in _NAMES.values() for name in names),
    *("model_type", "head_dim", "tie_word_embeddings", "torch_dtype", "hidden_act", "quantization_config"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers", "layer_types"),
    *("layers_block_type", "mlp_only_layers", "mlp_layer_types", "decoder_sparse_step", "text_config"),
]
JUNK = st.sampled_from(
    [None, True, 0, -1, 3, 2.5, 1e300, math.nan, "", "x", [], [1], ["x"], {}, {"x": 1}, {"rope_type": "x"}]
)


@given(st.dictionaries(st.sampled_from(WORDS), JUNK, min_size=1, max_size=3))
def test_junk_in_any_place_is_an_error_of_ours_or_a_model(changes: dict[str, Any]) -> None:
    try:
        model = from_config(published(**changes), name="x")
    except (CorruptModel, UnsupportedModel, ConfigError):
        return
    assert model.params > 0


def test_what_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No such file"):
        find_model(str(tmp_path / "none.json"))
    with pytest.raises(ModelNotFound, match=r"a folder without a config\.json"):
        find_model(str(tmp_path))
    file = tmp_path / "config.json"
    for text, message in (("{", "not JSON"), ("[]", "expected an object")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(CorruptModel, match=message):
            find_model(str(tmp_path))


def test_layers_with_a_state_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        from_config(published(layer_types=["linear_attention", "full_attention"]), name="x")
    with pytest.raises(UnsupportedModel, match="mamba"):
        from_config({"model_type": "mamba2"}, name="x")


def test_parts_that_differ_by_layer_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="hidden_size_per_layer_input is 256"):
        from_config(published(hidden_size_per_layer_input=256), name="x")
    with pytest.raises(UnsupportedModel, match="intermediate_size differs by layer"):
        from_config(published(intermediate_size=[1, 2]), name="x")


def test_dimensions_must_explain_the_checkpoint_beside_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()), encoding="utf-8")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}}), encoding="utf-8")
    assert find_model(str(tmp_path)).layers == 32
    index.write_text(json.dumps({"metadata": {"total_size": 22_000_000_000}}), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"8\.03 B parameters, 73% of the 22\.00 GB"):
        find_model(str(tmp_path))
    index.write_text("{}", encoding="utf-8")
    with pytest.raises(CorruptModel, match="total_size"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3moe", "mixtral"])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K], ids=lambda kind: str(kind.name)
)
def test_a_gguf_header(arch: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    few = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256} if arch == "qwen3moe" else {}
    reference = reference_model(arch, **few)
    write_gguf(path, reference, arch, kind)
    model = find_model(str(path))
    real = sum(parameter.numel() for parameter in reference.parameters())
    assert model.params == pytest.approx(real, rel=0.01)
    assert model.params * float(model.native.removesuffix("bit")) / 8 == pytest.approx(path.stat().st_size, rel=0.05)


def test_the_header_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference_model("llama"), "llama")
    whole = path.read_bytes()
    model = read_gguf(path)
    path.write_bytes(whole[: len(whole) // 2])  # the rest of the tensors' data is not there
    assert read_gguf(path) == model
    for kept in (0, 3, 20, 200):
        path.write_bytes(whole[:kept])
        with pytest.raises(CorruptModel):
            read_gguf(path)


def test_a_gguf_file_with_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    vector = np.zeros(256, dtype=np.float32)
    write_gguf(path, reference_model("llama"), "llama", extra={"blk.0.ssm_a": vector})
    with pytest.raises(UnsupportedModel, match="only decoders with attention"):
        find_model(str(path))


def test_what_is_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelNotFound, match="No such file"):
        find_model(str(path))
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        find_model(str(path))
    path.write_bytes(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(100))
    with pytest.raises(UnsupportedModel, match="version 9"):
        find_model(str(path))
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    with pytest.raises(CorruptModel, match="more than any model has"):
        find_model(str(path))
