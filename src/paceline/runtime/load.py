"""From a path to a model that runs: which road it takes, its weights, and what the rest must know about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.config import ModelConfig, config_from_hf, is_native_config
from paceline.runtime.formats.digest import files_digest
from paceline.runtime.formats.folder import (
    TOKENIZER_FILES,
    UNPACKED,
    eos_token_ids,
    quantization_method,
    read_config,
)
from paceline.runtime.formats.gguf import open_gguf
from paceline.runtime.formats.safetensors import PICKLED, SafetensorsWeights, weight_files
from paceline.runtime.formats.weights import CheckpointWeights, check_weights
from paceline.runtime.layers.mlp import ACTIVATIONS
from paceline.runtime.layers.native import WeightStore
from paceline.runtime.layers.rope import ROPE_TYPES
from paceline.runtime.making import Making, choose
from paceline.runtime.models.base import Model
from paceline.runtime.models.registry import native_model

# Called with a stage ("read"; on the transformers road also "verify") and how much of it is done, from 0 to 1.
Progress = Callable[[str, float], None]

# Part of every namespace: a change in how keys and values are laid out or computed makes old ones worthless.
_LAYOUT = "kv1"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What engine, server and people need to know about a loaded model."""

    name: str  # the file's or folder's name, without .gguf
    architecture: str  # the Hugging Face class name
    road: str  # "native" or "transformers"
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    num_layers: int  # layers that cache
    kv_bytes_per_token: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # "float32", "float16" or "bfloat16"; of weights and arithmetic
    kv_dtype: str  # of cached keys and values: a key of kernels.kvpool.KV_DTYPES
    device: str
    kernels: str  # "native" or "torch": what computes on it
    quantization: str  # of the weights: "none" or a key of layers.native.QUANTIZATIONS
    weights_bytes: int
    content: str  # hex digest of the checkpoint's files, its tokenizer's among them
    namespace: str  # hex digest of weights, tokenizer, types and layout; equal only if KV may be shared
    notes: tuple[str, ...] = ()  # what a person should know, one sentence each


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for a backend."""

    model: Model
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class _Order:
    """What either road is asked for."""

    making: Making
    limit: int | None  # of the context
    report: Progress
    packed_path: Callable[[], Path | None]  # where packed weights are kept; waits for the checkpoint's digest


@dataclass(frozen=True, slots=True)
class _Built:
    """What either road hands back."""

    model: Model
    architecture: str
    road: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    notes: tuple[str, ...] = ()


def load_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    kernels: str = "auto",
    quantization: str = "none",
    max_model_len: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a `.gguf` file or a folder in Hugging Face's layout.

    device         "cpu", "cuda", "cuda:1", ...; "auto" is CUDA where there is one
    dtype          "float32", "float16" or "bfloat16"; "auto" is float32 on a CPU, else what the checkpoint names
    kv_dtype       what keys and values are cached in, a key of `kernels.kvpool.KV_DTYPES`; "auto" is dtype, or
                   bfloat16 beside quantized weights
    kernels        "native" are those of the distribution paceline-native, for CPUs; "torch" runs everywhere; "auto" is
                   native where that can be
    quantization   "none", or what the native kernels keep weights in, a key of `layers.native.QUANTIZATIONS`
    max_model_len  the longest context to serve; None is the checkpoint's own (see `layers.rope` for what it fixes)
    cache_dir      where digests of large files and packed weights are kept for the next start; None keeps nothing
    progress       told how far each stage is

    Raises ModelNotFound, CorruptModel or UnsupportedModel with one line that says what is wrong, and ConfigError for
    a device, type, kernels, quantization or length that cannot be honoured.
    """
    source = Path(path)
    report = progress or _silent
    files = checkpoint_files(source)
    # The digest reads every byte, as loading does: side by side they share the page cache.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest") as pool:
        digest = pool.submit(files_digest, files, None if cache_dir is None else cache_dir / "digests")
        raw = {} if source.is_file() else read_config(source)
        named = raw.get("dtype") or raw.get("torch_dtype")
        making = choose(device, dtype, kernels, quantization, named, kv_dtype)

        def packed_path() -> Path | None:
            return None if cache_dir is None else making.packed_path(cache_dir, digest.result())

        order = _Order(making, max_model_len, report, packed_path)
        built = _load_gguf(source, order) if source.is_file() else _load_folder(source, raw, order)
        content = digest.result()
    return LoadedModel(built.model, _info(source, built, making, content))


def checkpoint_files(source: Path) -> list[Path]:
    """Every file whose content decides what the model computes and how its text is tokenised, in a fixed order.

    Raises ModelNotFound, and UnsupportedModel for pickled weights.
    """
    if source.is_file():
        if source.suffix in PICKLED:
            raise UnsupportedModel(
                f"{source}: pickled weights can run code when read and are refused; convert them to safetensors"
            )
        return [source]
    if not source.is_dir():
        raise ModelNotFound(f"{source}: no such file or folder")
    extras = [source / name for name in ("config.json", *TOKENIZER_FILES)]
    return [*weight_files(source), *(path for path in extras if path.is_file())]


def _load_gguf(path: Path, order: _Order) -> _Built:
    config, weights = open_gguf(path, order.making.read_dtype)
    if not _runs_natively(config):
        raise UnsupportedModel(f"{path}: {config.architecture} from GGUF has no native implementation")
    return _build_native(config, weights, order, config.eos_token_ids)


def _load_folder(folder: Path, raw: dict[str, Any], order: _Order) -> _Built:
    method = quantization_method(raw)
    if method is not None and method not in UNPACKED:
        raise UnsupportedModel(f"{folder}: weights quantized with {method!r} are not read; use the unquantized model")
    eos = eos_token_ids(folder, raw)
    config = _native_config(folder, raw) if method is None else None
    if config is not None:
        weights = SafetensorsWeights(folder, order.making.read_dtype)
        return _build_native(config, weights, order, eos)
    making = order.making
    making.require_torch(str(folder))
    # Imported here: transformers takes seconds, and the native road does without it.
    from paceline.runtime.models.transformers_road import load_transformers

    loaded = load_transformers(
        folder, device=making.device, dtype=making.dtype, max_model_len=order.limit, progress=order.report
    )
    return _Built(
        loaded,
        loaded.architecture,
        "transformers",
        loaded.max_model_len,
        tuple(token for token in eos if token < loaded.vocab_size),
        loaded.weights_bytes,
        loaded.notes,
    )


def _native_config(folder: Path, raw: dict[str, Any]) -> ModelConfig | None:
    """The config if a native family runs it as it is, else None: transformers' own code may."""
    if not is_native_config(raw):
        return None
    try:
        config = config_from_hf(raw, str(folder / "config.json"))
    except UnsupportedModel:
        return None
    return config if _runs_natively(config) else None


def _runs_natively(config: ModelConfig) -> bool:
    return (
        native_model(config.architecture) is not None
        and config.rope.rope_type in ROPE_TYPES
        and config.hidden_act in ACTIVATIONS
    )


def _build_native(config: ModelConfig, weights: CheckpointWeights, order: _Order, eos: tuple[int, ...]) -> _Built:
    """Check the weights against the config, then let the family take them."""
    longest = _context_length(config) if order.limit is None else order.limit
    if longest < 1:
        raise ConfigError(f"max_model_len is {longest}; it must be at least 1")
    config = replace(config, rope=replace(config.rope, max_model_len=longest))
    factory = native_model(config.architecture)
    assert factory is not None
    store = None
    try:
        check_weights(weights, config)
        store = WeightStore(order.packed_path())
        tracked = _Tracked(weights, order.report)
        parts = order.making.parts(tracked, store)
        model = factory(config, parts)
        store.keep()
        tracked.finish()
    finally:
        if store is not None:
            store.close()
        weights.close()
    eos = tuple(token for token in eos if token < config.vocab_size)
    return _Built(model, config.architecture, "native", longest, eos, parts.nbytes, _notes(config, longest))


def _context_length(config: ModelConfig) -> int:
    """Tokens the checkpoint says it can handle. YaRN's config often keeps the length before stretching."""
    rope = config.rope
    if rope.rope_type == "yarn" and rope.factor is not None:
        original = rope.original_max_position_embeddings or config.max_position_embeddings
        return max(config.max_position_embeddings, int(original * rope.factor))
    return config.max_position_embeddings


def _notes(config: ModelConfig, longest: int) -> tuple[str, ...]:
    """What a person should know about a context of `longest` tokens."""
    if config.rope.rope_type == "dynamic" and longest > config.max_position_embeddings:
        return (
            f"dynamic NTK is fixed at {longest} tokens for every request; up to "
            f"{config.max_position_embeddings} it would equal transformers",
        )
    made_for = _context_length(config)
    if longest > made_for:
        return (f"served up to {longest} tokens, beyond the {made_for} that the checkpoint was made for",)
    return ()


class _Tracked(CheckpointWeights):
    """Weights that report how many of them were taken. A second look at a tensor counts once."""

    def __init__(self, weights: CheckpointWeights, report: Progress) -> None:
        self.where = weights.where
        self._weights = weights
        self._report = report
        self._taken: set[str] = set()
        self._percent = -1

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._weights:
            raise CorruptModel(f"{self.where}: tensor {name} is missing")
        tensor = self._weights[name]
        self._taken.add(name)
        percent = 100 * len(self._taken) // len(self._weights)
        if percent > self._percent:  # a large model has tens of thousands of tensors: nobody wants a word of each
            self._percent = percent
            self._report("read", percent / 100)
        return tensor

    def finish(self) -> None:
        """All that was needed has been taken, even if it was little: the rest lay packed."""
        if self._percent < 100:
            self._report("read", 1.0)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def close(self) -> None:
        self._weights.close()


def _info(source: Path, built: _Built, making: Making, content: str) -> ModelInfo:
    specs: Sequence[Any] = built.model.kv_specs
    name, kv_name = (str(dtype).removeprefix("torch.") for dtype in (making.dtype, making.kv_dtype))
    kernels = "native" if making.native and built.road == "native" else "torch"
    layout = [(spec.kv_heads, spec.k_dim, spec.v_dim) for spec in specs]
    held = (name, kv_name, kernels, making.quantization)
    facts = (_LAYOUT, content, held, built.road, built.architecture, built.max_model_len, layout)
    return ModelInfo(
        name=source.name.removesuffix(".gguf"),
        architecture=built.architecture,
        road=built.road,
        vocab_size=built.model.vocab_size,
        max_model_len=built.max_model_len,
        num_layers=len(specs),
        kv_bytes_per_token=sum(spec.bytes_per_token(making.kv_dtype) for spec in specs),
        eos_token_ids=built.eos_token_ids,
        dtype=name,
        kv_dtype=kv_name,
        device=str(making.device),
        kernels=kernels,
        quantization=making.quantization,
        weights_bytes=built.weights_bytes,
        content=content,
        namespace=hashlib.sha256(repr(facts).encode()).hexdigest(),
        notes=built.notes if making.note is None or built.road != "native" else (*built.notes, making.note),
    )


def _silent(stage: str, fraction: float) -> None:
    """The progress of someone who does not ask."""
