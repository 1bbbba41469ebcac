"""GGUF files: every tensor type and family against transformers, and every way in which a file can be broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.runtime.batch import batch_of
from paceline.runtime.formats.gguf import open_gguf
from paceline.runtime.formats.gguf_file import SUPPORTED_TYPES, GGUFFile
from paceline.runtime.formats.weights import check_weights
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.load import load_model
from tests.runtime.gguf_files import interleave, random_blocks, reference_model, write_gguf

TOKENS = [3, 50, 7, 7, 21, 0, 63, 14, 9]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", {**EXPERTS, "num_experts": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 3}),
}


def logits_of(path: Path, tokens: list[int] = TOKENS) -> Tensor:
    """What our model says after each token of one prompt."""
    loaded = load_model(path, device="cpu", dtype="float32")
    assert loaded.info.road == "native"
    pool = KVPool(loaded.model.kv_specs, 64, 4)
    tables = [list(range(-(-len(tokens) // 4)))]
    batch = batch_of([tokens], [0], tables, block_size=4, scratch_block=pool.scratch_block, all_logits=True)
    with torch.inference_mode():
        return loaded.model.forward(batch, pool)


def reference_logits(model: Any, tokens: list[int] = TOKENS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("name", list(FAMILIES))
def test_each_family_computes_what_it_was_written_from(name: str, tmp_path: Path) -> None:
    arch, changes = FAMILIES[name]
    model = reference_model(arch, **changes)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, arch)
    torch.testing.assert_close(logits_of(path), reference_logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_each_tensor_type_as_transformers_reads_it(kind: Kind, tmp_path: Path) -> None:
    """transformers has dequantization of its own, so this compares two implementations."""
    write_gguf(tmp_path / "tiny.gguf", reference_model("llama"), "llama", kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    torch.testing.assert_close(logits_of(tmp_path / "tiny.gguf"), reference_logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_each_tensor_type_as_the_package_decodes_it(kind: Kind, tmp_path: Path) -> None:
    """Longer than one piece of our reading, and with rows permuted."""
    path = tmp_path / "tiny.gguf"
    wide = np.random.default_rng(0).standard_normal((1100, 256)).astype(np.float32)
    write_gguf(path, reference_model("llama"), "llama", kind, extra={"wide.weight": wide})
    file = GGUFFile(path)
    for entry in GGUFReader(path).tensors:
        want = torch.from_numpy(np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32))
        assert torch.equal(file.read(entry.name, torch.float32), want)
        assert file.tensors[entry.name].shape == tuple(want.shape)
        assert torch.equal(file.read(entry.name, torch.bfloat16), want.to(torch.bfloat16))
    order = np.random.default_rng(1).permutation(1100)
    assert torch.equal(file.read("wide.weight", torch.float32, order), file.read("wide.weight", torch.float32)[order])


def block_value(kind: Kind, block: bytes, index: int) -> float:
    """One value of a K block, straight from the layout that ggml documents; slow, and independent of the package."""

    def half(at: int) -> float:
        return float(np.frombuffer(block, np.float16, 1, at)[0])

    if kind is Kind.Q6_K:
        part, place = divmod(index, 128)
        low = block[part * 64 + place % 64] >> (4 * (place // 64)) & 15
        high = block[128 + part * 32 + place % 32] >> (2 * (place // 32)) & 3
        scale = np.frombuffer(block, np.int8, 16, 192)[index // 16]
        return half(208) * int(scale) * ((low | high << 4) - 32)
    group = index // 32
    scales = block[4:16]
    if group < 4:
        scale, minimum = scales[group] & 63, scales[group + 4] & 63
    else:
        scale = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
        minimum = scales[group + 4] >> 4 | scales[group] >> 6 << 4
    start = 16 if kind is Kind.Q4_K else 48
    quant = block[start + index // 64 * 32 + index % 32] >> (4 * (group % 2)) & 15
    if kind is Kind.Q5_K:
        quant |= (block[16 + index % 32] >> group & 1) << 4
    return half(0) * scale * quant - half(2) * minimum


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_k_blocks_by_their_definition(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference_model("llama"), "llama", kind)
    file = GGUFFile(path)
    got = file.read("blk.0.ffn_up.weight", torch.float32).flatten()
    entry = GGUFReader(path).tensors[[t.name for t in GGUFReader(path).tensors].index("blk.0.ffn_up.weight")]
    raw = bytes(entry.data.reshape(-1))
    size = len(raw) // (len(got) // 256)
    want = [block_value(kind, raw[b * size : (b + 1) * size], i) for b in range(8) for i in range(256)]
    torch.testing.assert_close(got[: len(want)], torch.tensor(want), rtol=1e-5, atol=1e-7)


def test_llama3_scaling_comes_as_divisors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = reference_model("llama", rope_parameters=rope)
    plain = reference_model("llama")
    divisors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "llama", extra={"rope_freqs.weight": divisors.numpy()})
    tokens = TOKENS * 6
    torch.testing.assert_close(logits_of(path, tokens), reference_logits(model, tokens), rtol=1e-3, atol=1e-3)
    assert (reference_logits(model, tokens) - reference_logits(plain, tokens)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_comes_as_metadata(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    metadata: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
        metadata["llama.rope.scaling.original_context_length"] = 32
    model = reference_model("llama", rope_parameters=rope)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "llama", metadata=metadata)
    tokens = TOKENS * 6
    torch.testing.assert_close(logits_of(path, tokens), reference_logits(model, tokens), rtol=1e-3, atol=1e-3)


def test_every_end_of_sequence_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference_model("qwen2"), "qwen2", metadata={"tokenizer.ggml.eot_token_id": 9})
    assert load_model(path).info.eos_token_ids == (2, 9)
    tokens = [f"t{i}" for i in range(64)]
    tokens[30], tokens[31] = "<|im_end|>", "<|eot_id|>"
    chat: dict[str, Any] = {"tokenizer.chat_template": "{{ m }}<|im_end|>", "tokenizer.ggml.tokens": tokens}
    write_gguf(path, reference_model("qwen2"), "qwen2", metadata=chat)
    assert load_model(path).info.eos_token_ids == (2, 30)


def test_interleaving_is_what_is_undone() -> None:
    """The writer of these tests against the definition: row 2i of a head is row i of its first half."""
    rows = torch.arange(16).reshape(16, 1)
    assert interleave(rows, 2).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


# Broken and unsupported files


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, reference_model("llama"), "llama")
    return path.read_bytes()


def broken(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    return path


def test_truncation_is_found_at_any_length(content: bytes, tmp_path: Path) -> None:
    for length in [0, 3, 4, 8, 20, *range(24, 4000, 97), len(content) // 2, len(content) - 1000]:
        with pytest.raises(CorruptModel, match=r"truncated|empty|begin with GGUF"):
            open_gguf(broken(tmp_path, content[:length]), torch.float32)


def test_damage_in_the_header_is_an_error_of_ours(content: bytes, tmp_path: Path) -> None:
    """Whatever byte is hit: a clear refusal, or a file that still makes sense; never a crash or a hang."""
    generator = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        data = bytearray(content)
        for at in generator.integers(0, 2500, 3):
            data[at] = generator.integers(0, 256)
        try:
            config, weights = open_gguf(broken(tmp_path, bytes(data)), torch.float32)
            check_weights(weights, config)
        except (CorruptModel, UnsupportedModel):
            refused += 1
    assert refused > 100


def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        GGUFFile(broken(tmp_path, b"PK\x03\x04" + content[4:]))
    with pytest.raises(UnsupportedModel, match="GGUF version 77"):
        GGUFFile(broken(tmp_path, content[:4] + struct.pack("<I", 77) + content[8:]))
    with pytest.raises(UnsupportedModel, match="big-endian"):
        GGUFFile(broken(tmp_path, content[:4] + struct.pack(">I", 3) + content[8:]))


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference_model("llama"), "llama", Kind.TQ2_0)
    with pytest.raises(UnsupportedModel, match=r"type TQ2_0, which is not read"):
        open_gguf(path, torch.float32)


def test_an_unknown_architecture_is_named(content: bytes, tmp_path: Path) -> None:
    data = content.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba", 1)
    with pytest.raises(UnsupportedModel, match="architecture 'mamba' is not read"):
        open_gguf(broken(tmp_path, data), torch.float32)


def test_a_missing_tensor_is_named(content: bytes, tmp_path: Path) -> None:
    data = content.replace(b"blk.1.attn_v.weight", b"blk.9.attn_v.weight", 1)
    with pytest.raises((CorruptModel, UnsupportedModel), match=r"blk\.9\.attn_v\.weight"):
        load_model(broken(tmp_path, data))


def test_missing_metadata_is_named(content: bytes, tmp_path: Path) -> None:
    data = content.replace(b"llama.block_count", b"llama.block_kount", 1)
    with pytest.raises(CorruptModel, match=r"llama\.block_count is missing"):
        open_gguf(broken(tmp_path, data), torch.float32)


def test_random_blocks_are_of_their_type() -> None:
    blocks = random_blocks((2, 512), Kind.Q4_K, np.random.default_rng(0))
    assert blocks.shape == (2, 2 * 144)
