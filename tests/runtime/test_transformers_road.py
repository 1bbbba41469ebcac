"""Architectures without a file of our own, through transformers' code on the paged cache, against its `generate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.runtime.batch import batch_of
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.load import LoadedModel, load_model
from paceline.runtime.models.transformers_attention import mask_window

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
# Windows are shorter than the sequences, so that they matter.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 10, "final_logit_softcapping": 5.0},
    "Gemma3": {"head_dim": 12, "sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 10},
    "Gemma3n": {"head_dim": 12, "sliding_window": 7, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB},
    "Phi3": {},
    "Cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "Cohere2": {"sliding_window": 7, "logit_scale": 0.5},
    "Olmo2": {},
    "Starcoder2": {"sliding_window": 9},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "Glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "GptOss": {"head_dim": 12, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": MLA,
    "DeepseekV3": MLA,
    "Phi": {},
    "StableLm": {},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
}


def tiny(name: str, folder: Path, **changes: Any) -> Any:
    """A random model of an architecture, saved in `folder`. Norms and biases are random too, so that each matters."""
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    known = {} if name == "GPT2" else SIZES
    config = config_class(**{**SIZES, **known, **ARCHITECTURES.get(name, {}), **changes})
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return model


def paged_logits(
    loaded: LoadedModel,
    texts: list[list[int]],
    seed: int,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Logits of every position of every text, computed in random chunks, in random mixes, over scattered blocks.

    `dtype` is the pool's.
    """
    random = Random(seed)
    per_text = [-(-len(text) // block_size) for text in texts]
    blocks = list(range(sum(per_text)))
    random.shuffle(blocks)
    pool = KVPool(loaded.model.kv_specs, len(blocks), block_size, dtype=dtype)
    tables = [[blocks.pop() for _ in range(count)] for count in per_text]
    done = [0] * len(texts)
    pieces: list[list[torch.Tensor]] = [[] for _ in texts]
    with torch.inference_mode():
        while any(at < len(text) for at, text in zip(done, texts, strict=True)):
            open_rows = [i for i, text in enumerate(texts) if done[i] < len(text)]
            rows = random.sample(open_rows, random.randint(1, len(open_rows)))
            ends = [min(len(texts[i]), done[i] + random.choice((1, 1, 2, 5, 13))) for i in rows]
            batch = batch_of(
                [texts[i][:end] for i, end in zip(rows, ends, strict=True)],
                [done[i] for i in rows],
                [tables[i] for i in rows],
                block_size=block_size,
                scratch_block=pool.scratch_block,
                all_logits=True,
            )
            logits = loaded.model.forward(batch, pool)
            assert logits.dtype == torch.float32
            for i, end in zip(rows, ends, strict=True):
                pieces[i].append(logits[: end - done[i]])
                logits = logits[end - done[i] :]
                done[i] = end
            assert len(logits) == 0
    return [torch.cat(parts) for parts in pieces]


def assert_equals_generate(reference: Any, loaded: LoadedModel, new_tokens: int = 20) -> None:
    """Greedy continuations by transformers' own `generate`, each step of which ours must agree with."""
    reference.set_attn_implementation("eager")
    random = Random(7)
    prompts = [[random.randrange(1, VOCAB) for _ in range(length)] for length in (1, 5, 17, 30)]
    texts, wanted = [], []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        texts.append(out.sequences[0].tolist())
        wanted.append(torch.cat(out.logits))
    for prompt, want, got in zip(prompts, wanted, paged_logits(loaded, texts, seed=3), strict=True):
        ours = got[len(prompt) - 1 : -1]
        torch.testing.assert_close(ours, want, rtol=1e-3, atol=2e-4)
        best = want.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-4
        assert (ours.argmax(-1) == want.argmax(-1))[clear].all()
        assert clear.float().mean() > 0.8


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_equals_generate(name: str, tmp_path: Path) -> None:
    reference = tiny(name, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.info.road == "transformers"
    assert_equals_generate(reference, loaded)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "DeepseekV2"])
def test_what_the_road_reports(name: str, tmp_path: Path) -> None:
    reference = tiny(name, tmp_path)
    loaded = load_model(tmp_path)
    info = loaded.info
    assert info.architecture == f"{name}ForCausalLM"
    assert (info.vocab_size, info.max_model_len, info.num_layers) == (VOCAB, 256, 4)
    assert info.weights_bytes >= sum(p.nbytes for p in reference.parameters())
    windows = [layer.window for layer in loaded.model.layers]  # type: ignore[attr-defined]
    heads = {(spec.kv_heads, spec.k_dim, spec.v_dim) for spec in loaded.model.kv_specs}
    if name == "DeepseekV2":
        assert windows == [None] * 4
        assert heads == {(4, 20, 10)}
        assert info.kv_bytes_per_token == 4 * 4 * (20 + 10) * 4
    else:
        assert windows == [7, None, 7, None]
        assert heads == {(2, 12, 12)}


def test_mxfp4_experts_are_unpacked(tmp_path: Path) -> None:
    """gpt-oss as it is published: values of four bits, a power of two for each 32 of them."""
    reference = tiny("GptOss", tmp_path, intermediate_size=32)
    tensors = load_file(tmp_path / "model.safetensors")
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((magnitudes, -magnitudes))
    for layer in range(4):
        experts = reference.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts, name)  # [experts, in, out]
            count, width, rows = parameter.shape
            blocks = torch.randint(0, 256, (count, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (count, rows, width // 32), dtype=torch.uint8)
            pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)
            exact = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
            parameter.data = exact.reshape(count, rows, width).transpose(1, 2).contiguous()
            full_name = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[full_name]
            tensors |= {f"{full_name}_blocks": blocks, f"{full_name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert_equals_generate(reference, load_model(tmp_path))


def test_a_loaded_model_is_out_of_reach_of_its_file(tmp_path: Path) -> None:
    tiny("Granite", tmp_path)
    module = load_model(tmp_path).model.module  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x00" * (path.stat().st_size // 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())


def test_a_step_without_logits(tmp_path: Path) -> None:
    """Chunks that end before their prompt does ask for none."""
    tiny("Gemma2", tmp_path)
    loaded = load_model(tmp_path)
    pool = KVPool(loaded.model.kv_specs, 2, 4)
    batch = batch_of([[1, 2, 3]], [0], [[0]], block_size=4, scratch_block=pool.scratch_block)
    with torch.inference_mode():
        assert loaded.model.forward(replace(batch, logit_rows=batch.logit_rows[:0]), pool).shape == (0, VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_cache_of_fewer_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """How prompts are cut and mixed changes nothing; rounding keys and values changes logits a little."""
    tiny("Gemma2", tmp_path)
    loaded = load_model(tmp_path)
    texts = [list(range(1, 30)), list(range(40, 53))]
    exact, first, second = (
        torch.cat(paged_logits(loaded, texts, seed, dtype=kept))
        for seed, kept in ((0, torch.float32), (0, dtype), (1, dtype))
    )
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
    likeness = torch.nn.functional.cosine_similarity(exact, first).min().item()
    assert 0.99 < likeness < 1 - 1e-7


def test_bfloat16_runs(tmp_path: Path) -> None:
    tiny("Gemma2", tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert loaded.info.dtype == "bfloat16"
    assert loaded.info.kv_bytes_per_token == 4 * 2 * 24 * 2


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 4.0, 9.0, 16.0],
}


def test_longrope_keeps_its_short_factors_within_the_original_context(tmp_path: Path) -> None:
    reference = tiny("Phi3", tmp_path, rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=64)
    loaded = load_model(tmp_path)
    assert loaded.info.max_model_len == 64
    assert "64" in loaded.info.notes[0]
    assert_equals_generate(reference, loaded)


def test_longrope_opened_further_uses_its_long_factors_for_every_length(tmp_path: Path) -> None:
    reference = tiny("Phi3", tmp_path, rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=64)
    loaded = load_model(tmp_path, max_model_len=256)
    assert loaded.info.max_model_len == 256
    text = list(range(1, 90))
    short, long = text[:20], text
    with torch.inference_mode():
        want = reference(torch.tensor([long])).logits[0]
        other = reference(torch.tensor([short])).logits[0]
    got_long, got_short = paged_logits(loaded, [long, short], seed=1)
    torch.testing.assert_close(got_long, want, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(got_short, want[:20], rtol=1e-3, atol=2e-4)
    assert (got_short - other).abs().max() > 1e-2  # the short factors would have given something else


def test_dynamic_ntk_keeps_its_base_while_a_longer_request_is_in_the_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    reference = tiny("Granite", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    assert load_model(tmp_path).info.max_model_len == 64
    loaded = load_model(tmp_path, max_model_len=200)
    text = list(range(1, 90)) * 3
    with torch.inference_mode():
        want = reference(torch.tensor([text[:200]])).logits[0]
    got_long, got_short = paged_logits(loaded, [text[:200], text[:20]], seed=1)
    torch.testing.assert_close(got_long, want, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(got_short, want[:20], rtol=1e-3, atol=2e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({"state_size": 4}, "state"),
    "Lfm2": ({"full_attn_idxs": [1]}, "conv"),
    "Qwen3Next": ({"linear_num_value_heads": 4, "linear_num_key_heads": 2}, "linear"),
    "Bloom": ({"n_layer": 2, "n_head": 4}, "predates the attention interface"),
    "Falcon": ({}, "predates the attention interface"),
    "Bert": ({}, "both directions|not causal"),
    "DeepseekV32": (MLA | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}, "'indices'"),
    "Llama4": ({"attention_chunk_size": 8, "num_local_experts": 2, "head_dim": 8}, "neither full nor a sliding window"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refuses_by_name_what_cannot_run(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[name]
    tiny(name, tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load_model(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_encoder_decoders(tmp_path: Path) -> None:
    tiny("Bart", tmp_path, d_model=32, encoder_layers=1, decoder_layers=1)
    change_config(tmp_path, is_encoder_decoder=True)
    with pytest.raises(UnsupportedModel, match=r"BartForCausalLM.*encoder-decoder"):
        load_model(tmp_path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_refuses_code_from_the_checkpoint(tmp_path: Path) -> None:
    tiny("Granite", tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    remote = {"auto_map": {"AutoConfig": "evil.Config"}}
    change_config(tmp_path, model_type="unheard_of", architectures=["Unheard"], **remote)
    with pytest.raises(UnsupportedModel, match=r"Unheard.*code from the checkpoint, which is never run"):
        load_model(tmp_path)


def test_refuses_an_unknown_architecture_by_name(tmp_path: Path) -> None:
    tiny("Granite", tmp_path)
    change_config(tmp_path, model_type="unheard_of")
    with pytest.raises(UnsupportedModel, match=r"unheard_of|Granite"):
        load_model(tmp_path)


def test_a_config_that_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    tiny("Granite", tmp_path)
    change_config(tmp_path, hidden_act=5)
    with pytest.raises(UnsupportedModel, match="transformers does not take") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_a_corrupt_model(tmp_path: Path) -> None:
    tiny("Granite", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    gone = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptModel, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        load_model(tmp_path)
    tensors["model.layers.1.mlp.down_proj.weight"] = gone[:, :-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CorruptModel, match=r"down_proj\.weight has shape \[32, 47\].*\[32, 48\]"):
        load_model(tmp_path)


def test_what_passes_between_tokens_outside_attention_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No flag says so, no mask shows it: only the comparison of logits can."""
    from transformers.models.granite.modeling_granite import GraniteMLP

    tiny("Granite", tmp_path)
    plain = GraniteMLP.forward

    def shifting(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + 0.5 * x.roll(1, dims=1))

    load_model(tmp_path)
    monkeypatch.setattr(GraniteMLP, "forward", shifting)
    with pytest.raises(UnsupportedModel, match="beside keys, values and positions"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("visible", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 5),
        (lambda b, h, q, k: (k <= q) & (k > q - 1000), None),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), "neither full nor a sliding window"),
        (lambda b, h, q, k: k >= 0, "not causal"),
        (lambda b, h, q, k: (k <= q) & (k % 2 == 0), "not causal"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k < 2)), "not causal"),
    ],
)
def test_windows_are_read_from_mask_functions(visible: Any, window: int | str | None) -> None:
    if isinstance(window, str):
        with pytest.raises(UnsupportedModel, match=window):
            mask_window(visible, 100, "Layer")
    else:
        assert mask_window(visible, 100, "Layer") == window
