"""Safetensors folders: single files and shards, and every way in which they can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.safetensors import INDEX, SINGLE, SafetensorsWeights, weight_files

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
    "c": torch.arange(4, dtype=torch.int64),
    "d": torch.randn(5, 5, dtype=torch.float16),
}


def write_shards(folder: Path, tensors: dict[str, Tensor] = TENSORS) -> None:
    """Two shards and their index."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for part, keys in enumerate((names[::2], names[1::2])):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys}, folder / file)
        weight_map |= dict.fromkeys(keys, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_every_tensor(sharded: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    if sharded:
        write_shards(tmp_path)
    else:
        save_file(TENSORS, tmp_path / SINGLE)
    weights = SafetensorsWeights(tmp_path, dtype)
    assert set(weights) == set(TENSORS)
    for name, tensor in TENSORS.items():
        want = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(weights[name], want)
        assert weights[name].dtype == want.dtype
        assert weights.shape(name) == tuple(tensor.shape)
    with pytest.raises(KeyError):
        weights["missing"]
    weights.close()


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    """Weights that still pointed into the file would change, or fault, when someone writes over it."""
    path = tmp_path / SINGLE
    save_file({"a": torch.ones(1000)}, path)
    weights = SafetensorsWeights(tmp_path, torch.float32)
    tensor = weights["a"]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 4000)
        file.write(b"\xff" * 4000)
    assert torch.equal(tensor, torch.ones(1000))
    weights.close()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptModel, match=r"model-00002-of-00002\.safetensors: this shard is missing"):
        SafetensorsWeights(tmp_path, torch.float32)


def test_a_truncated_file_is_found_without_reading_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    for length in (0, 4, 20, len(content) - 1):
        (tmp_path / SINGLE).write_bytes(content[:length])
        with pytest.raises(CorruptModel, match=r"model\.safetensors: truncated or not a safetensors file"):
            SafetensorsWeights(tmp_path, torch.float32)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match="tensor ghost is here, but it is not"):
        SafetensorsWeights(tmp_path, torch.float32)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CorruptModel, match="not a safetensors index"):
        SafetensorsWeights(tmp_path, torch.float32)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CorruptModel, match="not a plain file name"):
        SafetensorsWeights(folder, torch.float32)


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*convert them to safetensors"):
        weight_files(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no weights here"):
        weight_files(tmp_path)
