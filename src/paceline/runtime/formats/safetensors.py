"""Weights of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.weights import CheckpointWeights, own_copy

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Formats whose loading can run code from the file.
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsWeights(CheckpointWeights):
    """The tensors of a folder's safetensors files, read through memory maps.

    Opening reads headers only, and finds truncated files and missing shards. Raises CorruptModel, ModelNotFound
    where the folder has no weights, and UnsupportedModel where it has only pickled ones.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.where = str(folder)
        self.dtype = dtype
        self._files: dict[str, Any] = {}  # tensor name -> open file
        for path, names in _contents(folder).items():
            handle = _open(path)
            present = set(handle.keys())
            for name in sorted(present) if names is None else names:
                if name not in present:
                    raise CorruptModel(f"{path}: the index says tensor {name} is here, but it is not")
                self._files[name] = handle

    def __getitem__(self, name: str) -> Tensor:
        return own_copy(self._files[name].get_tensor(name), self.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def close(self) -> None:
        self._files.clear()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in a fixed order; errors as for SafetensorsWeights."""
    return sorted(_contents(folder))


def _contents(folder: Path) -> dict[Path, list[str] | None]:
    """Shard -> names of its tensors as the index gives them; None is all that the file has."""
    index = folder / INDEX
    if index.is_file():
        shards: dict[Path, list[str] | None] = {}
        for name, shard in _weight_map(index).items():
            # A shard lies beside its index; a path that leads elsewhere is not a checkpoint we trust.
            if Path(shard).name != shard:
                raise CorruptModel(f"{index}: shard name {shard!r} is not a plain file name")
            names = shards.setdefault(folder / shard, [])
            assert names is not None
            names.append(name)
        for path in shards:
            if not path.is_file():
                raise CorruptModel(f"{path}: this shard is missing, though {INDEX} lists it; download the model again")
        return shards
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise UnsupportedModel(
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when read; "
            f"convert them to safetensors: load with transformers where you trust the file, then save_pretrained()"
        )
    raise ModelNotFound(f"{folder}: no weights here (neither {SINGLE} nor {INDEX})")


def _weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor name to shard."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not found or not all(isinstance(k, str) and isinstance(v, str) for k, v in found.items()):
            raise ValueError("weight_map is empty or not a map of names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"{index}: not a safetensors index ({error})") from error
    return dict(found)


def _open(path: Path) -> Any:
    """An open safetensors file, its header checked against its size."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{path}: truncated or not a safetensors file ({error}); download it again") from error
