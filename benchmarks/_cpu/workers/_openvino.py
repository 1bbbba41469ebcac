"""How OpenVINO GenAI is set up, in the worker and behind HTTP alike."""

from __future__ import annotations

from importlib import import_module
from typing import Any

genai: Any = import_module("openvino_genai")


def pipeline_of(model: str, threads: int, kv_gib: float, options: dict[str, Any]) -> Any:
    """Continuous batching on what OpenVINO's own reader makes of a GGUF file."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = max(1, round(kv_gib))
    scheduler.max_num_batched_tokens = options.get("batch", 512)
    scheduler.max_num_seqs = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, **options.get("properties", {})}
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def config_of(count: int) -> Any:
    """Exactly so many greedy tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = count
    config.do_sample = False
    config.ignore_eos = True
    return config
