"""How much memory is free, and how many KV blocks that makes."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.app.settings import KVSettings
from paceline.errors import ConfigError

GIB = 1 << 30
_SHARE_ON_CPU = 0.3  # other programs live there too
_MOST_ON_CPU = 4 * GIB  # unless somebody asks for more: few CPUs are fast enough to fill it with running requests
_SHARE_ON_GPU = 0.9  # the rest is for activations
_UNLIMITED = 1 << 60  # control groups write "max", or a number near 2^63, where there is no limit


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still take: the machine's, or its control group's where that is less."""
    available = _meminfo_available(root / "proc/meminfo")
    if available is None:  # not Linux: half of what is built in is a fair guess
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limits = (
        (root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"),
        (root / "sys/fs/cgroup/memory/memory.limit_in_bytes", root / "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit_file, usage_file in limits:
        limit, usage = _read_bytes(limit_file), _read_bytes(usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            available = min(available, max(limit - usage, 0))
    return available


def _meminfo_available(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _read_bytes(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def count_blocks(kv: KVSettings, *, bytes_per_token: int, max_model_len: int, free_bytes: int, on_gpu: bool) -> int:
    """KV blocks that the settings and the free memory allow.

    Raises ConfigError when not even one sequence of `max_model_len` tokens would fit, with what would help.
    """
    block_bytes = bytes_per_token * kv.block_size
    needed_bytes = -(-max_model_len // kv.block_size) * block_bytes
    if kv.kv_gib is not None:
        budget, source = int(kv.kv_gib * GIB), "kv_gib"
        if budget > free_bytes:
            raise ConfigError(f"kv_gib is {kv.kv_gib:g} and only {free_bytes / GIB:.2f} GiB of memory are free")
    else:
        share = kv.kv_share or (_SHARE_ON_GPU if on_gpu else _SHARE_ON_CPU)
        budget, source = int(free_bytes * share), f"kv_share, {share:g} of {free_bytes / GIB:.2f} GiB free,"
        if kv.kv_share is None and not on_gpu:
            budget = min(budget, max(_MOST_ON_CPU, needed_bytes))
    if budget < needed_bytes:
        fits = budget // block_bytes * kv.block_size
        raise ConfigError(
            f"{source} gives a KV pool of {budget / GIB:.3f} GiB, which holds {fits} tokens; one sequence of "
            f"max_model_len {max_model_len} needs {needed_bytes / GIB:.3f} GiB. Give --kv-gib "
            f"{_round_up(needed_bytes / GIB)}" + (f" or --max-model-len {fits}" if fits else "")
        )
    return budget // block_bytes


def _round_up(gib: float) -> str:
    """To two decimals, never below: a value that is copied back must be enough."""
    return f"{-(-gib * 100 // 1) / 100:.2f}"
