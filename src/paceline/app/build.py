"""One engine from settings: model, KV pool, scheduler, tokenizer.

`EngineSpec` holds what an engine is made from, as plain values that travel between processes. An engine process is
started with the factory `start_engine`; one in the caller's own process (`llm.LLM`) is made by `make_engine` directly.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.app import memory, store
from paceline.app.config import resolve
from paceline.app.settings import TABLE, KVSettings, LogSettings, ModelSettings, SchedulerSettings, Settings
from paceline.app.warmup import infeasible_promises, warm_up
from paceline.core.calllog import RecordedScheduler
from paceline.core.config import SchedulerConfig
from paceline.core.scheduler import Scheduler
from paceline.cost.online import OnlineCost
from paceline.engine.messages import EngineInfo
from paceline.engine.server import EngineParts
from paceline.errors import ConfigError
from paceline.serve import logs

if TYPE_CHECKING:
    from paceline.runtime.load import ModelInfo

logger = logging.getLogger("paceline.build")

FACTORY = "paceline.app.build:start_engine"
ReportStage = Callable[..., None]  # (stage name, fraction done or None)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is made from."""

    path: str  # the model's file or folder
    name: str  # what clients call it
    cache: str  # folder for what a start leaves for the next: digests, packed weights, tokenizers of GGUF files
    model: ModelSettings
    scheduler: SchedulerSettings
    kv: KVSettings
    log: LogSettings | None = None  # None leaves the logging of the process as it is

    def to_config(self) -> dict[str, Any]:
        """Plain values, as they travel to the engine process."""
        config: dict[str, Any] = msgspec.to_builtins(self)
        return config


def plan_engine(
    settings: Settings, *, log: LogSettings | None = None, progress: store.Progress | None = None
) -> EngineSpec:
    """Find (or fetch) the model that the settings name. Raises ModelError when there is none."""
    cache = store.default_cache_dir(os.environ)
    found = store.resolve(settings.model.model, cache, progress=progress)
    return EngineSpec(
        path=str(found.path),
        name=next(iter(settings.model.served_names), found.name),
        cache=str(cache.parent),
        model=settings.model,
        scheduler=settings.scheduler,
        kv=settings.kv,
        log=log,
    )


def tokenizer_folder(spec: EngineSpec, content: str) -> Path:
    """Where the tokenizer of a checkpoint with this digest is kept, if it has to be converted."""
    return Path(spec.cache) / "tokenizers" / content[:32]


def expect_tokenizer(spec: EngineSpec) -> Path | None:
    """The folder that `EngineInfo.tokenizer_dir` will name, as far as that is known without reading the model."""
    from paceline.runtime.formats.digest import kept_digest
    from paceline.runtime.tokenizer_export import kept_tokenizer

    source = Path(spec.path)
    if source.is_dir():
        return source if (source / "tokenizer.json").is_file() else None
    content = kept_digest(source, Path(spec.cache) / "digests")
    return None if content is None else kept_tokenizer(tokenizer_folder(spec, content), content)


def plan_from_arguments(caller: str, model: str, arguments: Mapping[str, Any]) -> EngineSpec:
    """`plan_engine` for settings given as arguments of `caller`; neither file nor environment is read."""
    return plan_engine(settings_from_arguments(caller, model, arguments))


def settings_from_arguments(caller: str, model: str, arguments: Mapping[str, Any]) -> Settings:
    """Check them. Raises ConfigError naming the argument."""
    known = [name for name, entry in TABLE.items() if entry.slice in ("model", "scheduler", "kv")]
    unknown = next((name for name in arguments if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"{caller} has no setting {unknown!r}; known: {', '.join(known)}")
    given = {"model": model, **arguments}
    return resolve(given, flag_label=lambda entry: f"{caller}({entry.name}=...)").settings


def start_engine(config: dict[str, Any], report_stage: ReportStage) -> EngineParts:
    """`make_engine` for a process of its own, which writes the same kind of log as its parent."""
    spec = msgspec.convert(config, EngineSpec)
    if spec.log is not None:
        logs.configure(spec.log.log_format, spec.log.log_level)
    _import_runtime()
    return make_engine(spec, report_stage)


def _import_runtime() -> None:
    """Import what `make_engine` does, without looking for garbage: nearly all that they make stays.

    Collecting while torch is imported, and walking through all of it again before the first request, is a tenth of
    a start.
    """
    gc.disable()
    try:
        importlib.import_module("paceline.runtime.backend")
        importlib.import_module("paceline.runtime.load")
    finally:
        gc.freeze()
        gc.enable()


def make_engine(spec: EngineSpec, report_stage: ReportStage) -> EngineParts:
    """Load the model, size the KV pool and put a scheduler over it. Raises ModelError and ConfigError.

    Stages, after what `load_model` reports: cache, tokenizer, warm up.
    """
    # Seconds each, and the server's own process never needs them.
    import torch

    from paceline.runtime.backend import ModelBackend
    from paceline.runtime.load import load_model
    from paceline.runtime.tokenizer_export import export_tokenizer, read_eos_token_ids

    if spec.model.threads is not None:
        torch.set_num_threads(spec.model.threads)  # loading uses them too
    loaded = load_model(
        spec.path,
        device=spec.model.device,
        dtype=spec.model.dtype,
        kv_dtype=spec.kv.kv_cache_dtype,
        kernels=spec.model.kernels,
        quantization=spec.model.quantization,
        max_model_len=spec.scheduler.max_model_len,
        cache_dir=Path(spec.cache),
        progress=report_stage,
    )
    info = loaded.info
    _set_threads(spec.model, info)
    for note in info.notes:
        logger.warning("%s", note)
    report_stage("cache")
    num_blocks = memory.count_blocks(
        spec.kv,
        bytes_per_token=info.kv_bytes_per_token,
        max_model_len=info.max_model_len,
        free_bytes=_free_bytes(info.device),
        on_gpu=info.device != "cpu",
    )
    backend = ModelBackend(loaded, num_blocks, spec.kv.block_size)
    report_stage("tokenizer")
    own_folder = tokenizer_folder(spec, info.content)
    tokenizer_dir = export_tokenizer(spec.path, own_folder, content=info.content)
    # Not by way of `Tokenizer`: whoever has text makes that, and the server does while this process imports torch.
    eos_of_tokenizer = read_eos_token_ids(tokenizer_dir, info.vocab_size)
    report_stage("warm up")
    scheduler = _make_scheduler(spec, info, num_blocks)
    warm_up(scheduler, backend, info.vocab_size)
    for sentence in infeasible_promises(scheduler):
        logger.warning("%s", sentence)
    engine_info = EngineInfo(
        model=spec.name,
        architecture=info.architecture,
        road=info.road,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        # The checkpoint's ends and its tokenizer's: a chat model's turns often end with a token of the latter alone.
        eos_token_ids=tuple(dict.fromkeys((*info.eos_token_ids, *eos_of_tokenizer))),
        tokenizer_dir=str(tokenizer_dir),
        block_size=spec.kv.block_size,
        num_blocks=num_blocks,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        device=info.device,
        kernels=info.kernels,
        quantization=info.quantization,
        weights_bytes=info.weights_bytes,
        kv_bytes=num_blocks * spec.kv.block_size * info.kv_bytes_per_token,
        namespace=info.namespace,
    )
    return EngineParts(scheduler, backend, engine_info)


def _set_threads(settings: ModelSettings, info: ModelInfo) -> None:
    """Give the native kernels their threads, where they compute, and leave torch one: its own would spin beside them.

    Raises ConfigError for cores that this process may not use, or that nothing would be pinned to.
    """
    if info.kernels != "native":
        if settings.cores:
            raise ConfigError("cores pins the threads of the native kernels, and torch computes here; take taskset")
        return
    import torch

    from paceline.runtime.kernels.native import set_threads

    set_threads(settings.threads, settings.cores)
    torch.set_num_threads(1)


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return memory.free_host_bytes()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def _make_scheduler(spec: EngineSpec, info: ModelInfo, num_blocks: int) -> Scheduler:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=info.max_model_len,
        block_size=spec.kv.block_size,
        max_num_batched_tokens=spec.scheduler.max_num_batched_tokens,
        max_num_seqs=spec.scheduler.max_num_seqs,
        prefix_caching=spec.kv.prefix_caching,
        max_waiting=spec.scheduler.max_waiting,
        policy=spec.scheduler.policy,
        policy_options=spec.scheduler.policy_options,
        classes=spec.scheduler.classes,
        namespace=info.namespace,
    )
    if spec.scheduler.call_log is None:
        return Scheduler(config, OnlineCost())
    try:
        # Line by line: a log that lost its end in a crash would be of little use. The process's end closes it.
        file = open(spec.scheduler.call_log, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"call_log {spec.scheduler.call_log} cannot be written: {error.strerror}") from error
    return RecordedScheduler(config, file, OnlineCost())
