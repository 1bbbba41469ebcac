"""load_model: which road, what it reports, what makes a namespace, and one clear line for everything it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ConfigError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from paceline.runtime.batch import batch_of
from paceline.runtime.formats.config import config_from_hf
from paceline.runtime.formats.digest import file_digest, files_digest, kept_digest
from paceline.runtime.formats.folder import read_config
from paceline.runtime.formats.gguf_file import GGUFFile
from paceline.runtime.formats.safetensors import SINGLE, SafetensorsWeights
from paceline.runtime.formats.weights import expected_shapes
from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool
from paceline.runtime.kernels.native import native, unavailable
from paceline.runtime.layers.native import NativeParts
from paceline.runtime.load import load_model
from tests.runtime.gguf_files import encode, reference_model, write_gguf

BIG = (5120, 2048)  # 40 MiB in float32: from 32 MiB on, the allocator gives memory back as soon as it is freed
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama."""
    save(tmp_path)
    return tmp_path


def save(folder: Path, family: str = "Llama", seed: int = 0, **changes: Any) -> None:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def panel_padding(tensors: dict[str, Tensor]) -> int:
    """Bytes that native kernels add to float32 maps [out, in]: channels come in whole panels, q, k and v in one map."""
    if unavailable() is not None:
        return 0
    panel = 32 if native().isa() == "avx512" else 16
    channels: dict[str, int] = {}
    inputs: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            in_map = re.sub(r"[qkv]_proj", "qkv", name)
            channels[in_map] = channels.get(in_map, 0) + tensor.shape[0]
            inputs[in_map] = tensor.shape[1]
    return sum(-channels[name] % panel * inputs[name] * 4 for name in channels)


def test_what_a_native_model_reports(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    loaded = load_model(folder, progress=lambda stage, done: told.append((stage, done)))
    info = loaded.info
    assert (info.name, info.architecture, info.road) == (folder.name, "LlamaForCausalLM", "native")
    assert (info.vocab_size, info.max_model_len, info.num_layers, info.eos_token_ids) == (64, 128, 2, (2,))
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.kv_bytes_per_token == 2 * 2 * (8 + 8) * 4
    in_file = sum(t.nbytes for t in load_file(folder / SINGLE).values())
    assert info.weights_bytes == in_file + panel_padding(load_file(folder / SINGLE))
    assert loaded.model.vocab_size == 64
    fractions = [done for stage, done in told if stage == "read"]
    assert fractions == sorted(set(fractions))
    assert fractions[-1] == 1.0


def test_the_type_of_the_cache_is_a_choice_of_its_own(folder: Path) -> None:
    found = {name: load_model(folder, kv_dtype=name).info for name in ("auto", *KV_DTYPES)}
    assert {info.dtype for info in found.values()} == {"float32"}
    assert {name: (info.kv_dtype, info.kv_bytes_per_token) for name, info in found.items()} == {
        "auto": ("float32", 2 * 2 * (8 + 8) * 4),
        "float32": ("float32", 2 * 2 * (8 + 8) * 4),
        "bfloat16": ("bfloat16", 2 * 2 * (8 + 8) * 2),
        "float16": ("float16", 2 * 2 * (8 + 8) * 2),
        "int8": ("int8", 2 * 2 * (8 + 8 + 2 * 4)),  # with a float32 scale for keys and one for values
    }
    info = load_model(folder, dtype="bfloat16").info
    assert (info.dtype, info.kv_dtype) == ("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'int4' is not one of auto, float32, bfloat16"):
        load_model(folder, kv_dtype="int4")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_each_native_family_has_exactly_the_tensors_expected(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    if family == "Qwen3Moe":
        changes |= {"moe_intermediate_size": 16, "mlp_only_layers": [1]}
    save(tmp_path, family, **changes)
    weights = SafetensorsWeights(tmp_path, torch.float32)
    expected = dict(expected_shapes(config_from_hf(read_config(tmp_path))))
    assert {name: weights.shape(name) for name in weights} == expected
    assert load_model(tmp_path).info.road == "native"


def test_what_no_family_of_ours_runs_takes_the_other_road(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    save(tmp_path, rope_parameters=rope | {"original_max_position_embeddings": 128})
    assert load_model(tmp_path).info.road == "transformers"
    save(tmp_path, hidden_act="mish")
    assert load_model(tmp_path).info.road == "transformers"
    save(tmp_path)
    assert load_model(tmp_path).info.road == "native"


def test_contexts(tmp_path: Path) -> None:
    def longest(limit: int | None = None, **rope: Any) -> tuple[int, int]:
        save(tmp_path, rope_parameters={"rope_theta": 1e4, **rope} if rope else None)
        info = load_model(tmp_path, kernels="torch", max_model_len=limit).info
        return info.max_model_len, len(info.notes)

    assert longest() == (128, 0)
    assert longest(40) == (40, 0)
    assert longest(400) == (400, 1)
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=128) == (512, 0)
    assert longest(rope_type="linear", factor=4.0) == (128, 0)
    assert longest(rope_type="dynamic", factor=4.0) == (128, 0)
    assert longest(512, rope_type="dynamic", factor=4.0) == (512, 1)
    with pytest.raises(ConfigError, match="max_model_len is 0"):
        load_model(tmp_path, max_model_len=0)


# Namespaces


def test_a_namespace_follows_the_content(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("digests")
    first = load_model(folder, cache_dir=cache).info.namespace
    assert load_model(folder, cache_dir=cache).info.namespace == first == load_model(folder).info.namespace
    assert len(first) == 64

    seen = {first}

    def is_new(**options: Any) -> bool:
        now = load_model(folder, cache_dir=cache, **options).info.namespace
        fresh = now not in seen
        seen.add(now)
        return fresh

    assert is_new(dtype="bfloat16")
    assert is_new(kv_dtype="bfloat16")
    assert is_new(kv_dtype="int8")
    assert not is_new(kv_dtype="float32")  # which it is without
    assert is_new(max_model_len=64)
    stat = (folder / SINGLE).stat()
    with (folder / SINGLE).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x00\x40")
    # The same file, size and time of change: what a careless sync leaves.
    os.utime(folder / SINGLE, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (folder / SINGLE).stat().st_mtime_ns == stat.st_mtime_ns
    assert is_new()
    (folder / "tokenizer_config.json").write_text("{}")
    assert is_new()
    change_config(folder, rms_norm_eps=1e-3)
    assert is_new()
    (folder / "README.md").write_text("unrelated")
    assert not is_new()


def test_digests_are_of_content_and_kept(tmp_path: Path) -> None:
    import hashlib

    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert file_digest(path) == file_digest(path, cache) == digest
    (entry,) = cache.iterdir()
    entry.write_text("f" * 64)  # proof that the second look is not a second reading
    assert file_digest(path, cache) == "f" * 64
    assert kept_digest(path, cache) == files_digest([path], cache)
    path.write_bytes(b"WEIGHTS")
    assert kept_digest(path, cache) is None
    assert file_digest(path, cache) == hashlib.sha256(b"WEIGHTS").hexdigest()
    (tmp_path / "other").write_bytes(b"")
    assert files_digest([path, tmp_path / "other"]) != files_digest([tmp_path / "other", path])
    (tmp_path / "blocked").write_text("a file where the cache folder would be")
    assert file_digest(path, tmp_path / "blocked") == file_digest(path)
    assert kept_digest(path, tmp_path / "blocked") is None
    assert kept_digest(tmp_path / "nowhere", cache) is None


# Refusals


def refuses(path: Path, kind: type[ModelError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", ModelNotFound, "no such file or folder")
    refuses(tmp_path, ModelNotFound, "no weights here")
    save(tmp_path)
    (tmp_path / "config.json").unlink()
    refuses(tmp_path, ModelNotFound, r"no config\.json")


def test_pickled_files(folder: Path) -> None:
    path = folder / "model.pt"
    path.write_bytes(b"\x80\x02")
    refuses(path, UnsupportedModel, "pickled weights can run code")
    (folder / SINGLE).rename(folder / "aside")
    refuses(folder, UnsupportedModel, "only pickled weights")


def test_a_missing_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refuses(folder, CorruptModel, r"tensor model\.layers\.1\.self_attn\.k_proj\.weight is missing")


def test_a_wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=50)
    refuses(folder, CorruptModel, r"mlp\.gate_proj\.weight has shape \[48, 32\], the config asks for \[50, 32\]")


def test_a_tensor_without_a_use(folder: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    change_weights(folder, lambda tensors: tensors.update(bias))
    refuses(folder, UnsupportedModel, r"no use for tensor model\.layers\.0\.self_attn\.q_proj\.bias")
    change_weights(folder, lambda tensors: tensors.pop(next(iter(bias))))
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "score.weight": torch.ones(2)}
    change_weights(folder, lambda tensors: tensors.update(harmless))
    load_model(folder)


def test_quantized_folders(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refuses(folder, UnsupportedModel, "quantized with 'gptq'")


def test_settings_that_cannot_be_honoured(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'float8' is not one of auto, float32, float16, bfloat16"):
        load_model(folder, dtype="float8")
    with pytest.raises(ConfigError, match="device 'abacus' is not known"):
        load_model(folder, device="abacus")
    with pytest.raises(ConfigError, match="device 'meta': Paceline runs on cpu and cuda alone"):
        load_model(folder, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            load_model(folder, device="cuda")


# Memory


def anonymous_bytes() -> int:
    """This process's memory that is not a view of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not say how much memory is anonymous")


def memory_of_reading(folder: Path) -> dict[str, tuple[int, int]]:
    """For each format: bytes left of tensors that nobody holds, and bytes of one that is held."""
    weights = SafetensorsWeights(folder, torch.float32)
    file = GGUFFile(folder / "m.gguf")
    readers: dict[str, Callable[[str], Tensor]] = {
        "safetensors": weights.__getitem__,
        "gguf": lambda name: file.read(name, torch.float32),
    }
    found = {}
    for form, read in readers.items():
        read("t0")  # what a first use sets up stays
        before, left = anonymous_bytes(), 0
        for name in ("t1", "t2", "t3"):
            assert read(name).shape == BIG
            left = max(left, anonymous_bytes() - before)
        tensor = read("t0")
        found[form] = left, anonymous_bytes() - before
        del tensor
    return found


def test_reading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    anonymous_bytes()  # skips where it cannot be known
    names = [f"t{i}" for i in range(4)]
    save_file({name: torch.randn(BIG, dtype=torch.bfloat16) for name in names}, tmp_path / SINGLE)
    extra = {name: torch.randn(BIG).numpy() for name in names}
    write_gguf(tmp_path / "m.gguf", reference_model("llama"), "llama", GGMLQuantizationType.Q8_0, extra=extra)
    # In a process of its own: one that has held models before gives and takes nothing at this size.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(memory_of_reading, tmp_path).result()
    size = 4 * BIG[0] * BIG[1]
    for form, (left, held) in found.items():
        assert left < size // 2, form
        assert size // 2 <= held < 2 * size, form


def test_quantized_rows_are_bytes() -> None:
    import numpy as np

    values = np.ones((4, 256), dtype=np.float32)
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q6_K):
        assert encode(values, kind, np.random.default_rng(0)).shape[0] == 4


# Packed weights


def test_a_second_start_maps_what_the_first_packed(folder: Path, tmp_path: Path) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)

    def logits(quantization: str) -> tuple[Tensor, list[tuple[str, float]]]:
        told: list[tuple[str, float]] = []
        loaded = load_model(
            folder, quantization=quantization, cache_dir=tmp_path, progress=lambda *stage: told.append(stage)
        )
        pool = KVPool(loaded.model.kv_specs, 4, 16)
        batch = batch_of([[1, 2, 3]], [0], [[0]], block_size=16, scratch_block=pool.scratch_block)
        with torch.inference_mode():
            return loaded.model.forward(batch, pool), told

    for quantization in ("none", "int8"):
        packed, told = logits(quantization)
        assert len(told) > 2
        mapped, told = logits(quantization)
        assert told == [("read", 1.0)]  # nothing was read
        assert torch.equal(packed, mapped)
    assert len(list((tmp_path / "packed").iterdir())) == 2


def test_a_model_that_fails_to_load_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(NativeParts, "stack", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(folder, cache_dir=tmp_path)
    assert list((tmp_path / "packed").iterdir()) == []


def test_what_native_kernels_alone_can_do_is_refused_without_them(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization 'int8' cannot be had: kernels 'torch' was asked for"):
        load_model(folder, kernels="torch", quantization="int8")
    with pytest.raises(ConfigError, match="kernels 'fast' is not one of auto, native, torch"):
        load_model(folder, kernels="fast")
    with pytest.raises(ConfigError, match="quantization 'int3' is not one of none, int8, int4"):
        load_model(folder, quantization="int3")
    with pytest.raises(ConfigError, match="kernels 'native' cannot be had: the native kernels know no float16"):
        load_model(folder, kernels="native", dtype="float16")
