"""config.json as a ModelConfig, against transformers' own reading of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.config import config_from_hf, is_native_config
from paceline.runtime.formats.folder import eos_token_ids, read_config

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
REQUIRED: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
}
# Everything else may be left out, and then the family's default holds.
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "num_key_value_heads": st.sampled_from([1, 4, 16, 64]),
    "head_dim": st.sampled_from([4, 32, 128]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
    "max_position_embeddings": st.integers(16, 100_000),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "rope_theta": st.sampled_from([10_000.0, 500_000.0]),
    "sliding_window": st.one_of(st.none(), st.integers(1, 50)),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 6),
    "num_experts_per_tok": st.integers(1, 3),
    "moe_intermediate_size": st.integers(1, 50),
    "norm_topk_prob": st.booleans(),
    "decoder_sparse_step": st.integers(1, 3),
    "mlp_only_layers": st.lists(st.integers(0, 5), max_size=3),
    "eos_token_id": st.one_of(st.none(), st.integers(0, 99), st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    kept = {name: draw(value) for name, value in OPTIONAL.items() if draw(st.booleans())}
    return {"model_type": draw(st.sampled_from(list(FAMILIES))), **REQUIRED, **kept}


@settings(max_examples=200, deadline=None)
@given(files())
def test_reads_what_transformers_reads(raw: dict[str, Any]) -> None:
    given_fields = {key: value for key, value in raw.items() if key != "model_type"}
    theirs = getattr(transformers, f"{FAMILIES[raw['model_type']]}Config")(**given_fields)
    ours = config_from_hf(raw)
    for name in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    if ours.model_type in ("llama", "qwen3", "qwen3_moe"):
        assert ours.attention_bias == ours.attention_out_bias == theirs.attention_bias
    # What each layer sees: by layer_types where the family has them, else by the one window.
    window = getattr(theirs, "sliding_window", None) if ours.model_type != "llama" else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 6
    for layer, kind in enumerate(kinds):
        assert ours.layer_window(layer) == (window if kind == "sliding_attention" else None)
    if ours.model_type in ("mixtral", "qwen3_moe"):
        assert (ours.num_experts, ours.num_experts_per_tok) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    if ours.model_type == "mixtral":
        assert (ours.moe_intermediate_size, ours.norm_topk_prob) == (theirs.intermediate_size, True)
    if ours.model_type == "qwen3_moe":
        assert ours.moe_intermediate_size == theirs.moe_intermediate_size
        assert ours.norm_topk_prob == theirs.norm_topk_prob
    for layer in range(6):
        sparse = ours.model_type == "mixtral" or (
            ours.model_type == "qwen3_moe"
            and layer not in theirs.mlp_only_layers
            and (layer + 1) % theirs.decoder_sparse_step == 0
        )
        assert ours.is_moe_layer(layer) == sparse


@pytest.mark.parametrize("family", list(FAMILIES))
def test_reads_what_transformers_writes(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{FAMILIES[family]}Config")(**REQUIRED, num_key_value_heads=4)
    theirs.save_pretrained(tmp_path)
    ours = config_from_hf(read_config(tmp_path))
    assert ours.architecture == f"{FAMILIES[family]}ForCausalLM"
    assert ours.num_key_value_heads == 4
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]


LLAMA = {"model_type": "llama", **REQUIRED}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of at least 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number"),
        ({"num_key_value_heads": 3}, "64 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0, expected a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor is 1000"),
        ({"rope_parameters": 5}, "rope parameters are 5, expected an object"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than any model has"),
        ({"hidden_size": float("inf")}, "hidden_size is inf, expected an integer"),
        ({"hidden_size": float("nan")}, "hidden_size is nan, expected an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
    ],
)
def test_names_the_field_at_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        config_from_hf({**LLAMA, **changes}, "here/config.json")


def test_other_families_are_not_native() -> None:
    assert is_native_config(LLAMA)
    assert not is_native_config({"model_type": "gemma2"})
    assert not is_native_config({**LLAMA, "architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(UnsupportedModel, match="no native implementation"):
        config_from_hf({"model_type": "gemma2"})


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_every_end_of_sequence_is_found(tmp_path: Path) -> None:
    config = {"eos_token_id": 2, "text_config": {"eos_token_id": [5]}}
    assert eos_token_ids(tmp_path, config) == (2, 5)
    write(tmp_path, generation_config={"eos_token_id": [7, 2]})
    assert eos_token_ids(tmp_path, config) == (7, 2, 5)
    write(tmp_path, tokenizer_config={"eos_token": {"content": "<|im_end|>"}})
    assert eos_token_ids(tmp_path, config) == (7, 2, 5)  # nothing here knows its id
    write(tmp_path, tokenizer={"added_tokens": [], "model": {"vocab": {"a": 0, "<|im_end|>": 9}}})
    assert eos_token_ids(tmp_path, config) == (7, 2, 5, 9)
    write(tmp_path, tokenizer={"added_tokens": [{"id": 8, "content": "<|im_end|>"}]})
    assert eos_token_ids(tmp_path, config) == (7, 2, 5, 8)
    decoder = {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", **decoder})
    assert eos_token_ids(tmp_path, config) == (7, 2, 5)


def test_config_json_must_be_there_and_be_json(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match="not readable as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CorruptModel, match="nested too deeply"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CorruptModel, match="expected a JSON object"):
        read_config(tmp_path)
