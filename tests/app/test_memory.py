"""Sizing of the KV pool: what is free, what fits, and advice that works when copied back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.app.memory import GIB, count_blocks, free_host_bytes
from paceline.app.settings import KVSettings
from paceline.errors import ConfigError


def size(kv: KVSettings, free_gib: float = 16, max_model_len: int = 8192, *, on_gpu: bool = False) -> int:
    free = int(free_gib * GIB)
    return count_blocks(kv, bytes_per_token=46_080, max_model_len=max_model_len, free_bytes=free, on_gpu=on_gpu)


def test_a_size_in_gib_is_spent_to_the_last_whole_block() -> None:
    blocks = size(KVSettings(kv_gib=1.0))
    assert blocks * 16 * 46_080 <= GIB < (blocks + 1) * 16 * 46_080


def test_shares() -> None:
    assert size(KVSettings(kv_share=0.5)) == size(KVSettings(kv_gib=8))
    assert size(KVSettings(), on_gpu=True) == size(KVSettings(kv_share=0.9))
    assert size(KVSettings(), free_gib=8) == size(KVSettings(kv_share=0.3), free_gib=8)
    assert size(KVSettings(), free_gib=200) == size(KVSettings(kv_gib=4))
    assert size(KVSettings(), free_gib=200, max_model_len=131_072) * 16 == 131_072


@given(
    kv_gib=st.floats(0.0001, 4),
    free_gib=st.floats(0.01, 8),
    bytes_per_token=st.integers(64, 1 << 20),
    max_model_len=st.integers(1, 200_000),
    block_size=st.integers(1, 256),
)
def test_one_sequence_fits_or_the_advice_makes_it_fit(
    kv_gib: float, free_gib: float, bytes_per_token: int, max_model_len: int, block_size: int
) -> None:
    def blocks(kv_gib: float, max_model_len: int, free_bytes: int) -> int:
        return count_blocks(
            KVSettings(kv_gib=kv_gib, block_size=block_size),
            bytes_per_token=bytes_per_token,
            max_model_len=max_model_len,
            free_bytes=free_bytes,
            on_gpu=False,
        )

    try:
        found = blocks(kv_gib, max_model_len, int(free_gib * GIB))
    except ConfigError as error:
        said = str(error)
    else:
        assert found * block_size >= max_model_len
        assert found * block_size * bytes_per_token <= kv_gib * GIB <= free_gib * GIB
        return
    if "GiB of memory are free" in said:
        assert kv_gib * GIB > int(free_gib * GIB) - 1
        return
    advice = re.search(r"Give --kv-gib ([\d.e+]+)(?: or --max-model-len (\d+))?$", said)
    assert advice is not None, said
    assert blocks(float(advice[1]), max_model_len, 1 << 50) * block_size >= max_model_len
    if advice[2] is not None:
        assert blocks(kv_gib, int(advice[2]), 1 << 50) * block_size >= int(advice[2])


def test_too_little_is_one_line_with_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        size(KVSettings(), free_gib=0.5)
    assert str(caught.value) == (
        "kv_share, 0.3 of 0.50 GiB free, gives a KV pool of 0.150 GiB, which holds 3488 tokens; one sequence of "
        "max_model_len 8192 needs 0.352 GiB. Give --kv-gib 0.36 or --max-model-len 3488"
    )
    with pytest.raises(ConfigError, match=r"kv_gib is 32 and only 16\.00 GiB of memory are free"):
        size(KVSettings(kv_gib=32))


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_free_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    assert free_host_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000\n")
    assert free_host_bytes(tmp_path) == 4000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("3000\n")
    assert free_host_bytes(tmp_path) == 2000
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("5000\n")
    assert free_host_bytes(tmp_path) == 0


def test_free_memory_of_this_machine_is_plausible() -> None:
    assert 1 << 20 < free_host_bytes() < 1 << 50
