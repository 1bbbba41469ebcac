"""Files of measured kernels, as rows of numbers. Two forms are read:

- one CSV for each kind of kernel, `PREFIX_gemm_perf.csv` and so on, latency in ms, columns that never change in a
  `.const.json` beside it (AIConfigurator's collections);
- one CSV of the linear layers of one model, by tokens and tensor-parallel degree (Vidur's profiles).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ConfigError

KINDS = ("gemm", "context_attention", "generation_attention", "moe", "custom_allreduce", "nccl")
DTYPES = {"bfloat16": "bf16", "float16": "bf16", "half": "bf16", "fp8": "fp8", "fp8_block": "fp8_block"}
MILLI = 1e-3


class Row(NamedTuple):
    """One measurement: its file's columns, and seconds."""

    columns: dict[str, str]
    seconds: float
    where: str  # file and line, for messages

    def number(self, name: str) -> int:
        """A column that counts something. ConfigError names file, line and column."""
        try:
            return int(self.columns[name])
        except (KeyError, ValueError):
            raise ConfigError(
                f"{self.where}: column {name} is {self.columns.get(name)!r}, not a whole number"
            ) from None

    def dtype(self, name: str) -> str:
        """A column that names a format, as this package calls it."""
        found = self.columns.get(name, "bfloat16")
        return DTYPES.get(found, found)


def read_kind(folder: Path, prefix: str, kind: str) -> Iterator[Row]:
    """Rows of one kind of kernel; none where its file is missing. ConfigError names the line that is malformed."""
    path = folder / f"{prefix}_{kind}_perf.csv"
    if not path.exists():
        return
    fixed = folder / f"{prefix}_{kind}_perf.const.json"
    constants = {name: str(value) for name, value in json.loads(fixed.read_text()).items()} if fixed.exists() else {}
    with path.open(newline="") as file:
        for line, columns in enumerate(csv.DictReader(file), start=2):
            where = f"{path.name}:{line}"
            yield Row(constants | columns, _seconds(columns.get("latency"), where), where)


def read_linear(path: Path) -> Iterator[tuple[int, int, int, float]]:
    """(m, n, k, seconds) of the four multiplies of a dense layer, from medians in ms."""
    with path.open(newline="") as file:
        for line, columns in enumerate(csv.DictReader(file), start=2):
            row = Row(columns, 0.0, f"{path.name}:{line}")
            tokens, tp = row.number("num_tokens"), row.number("num_tensor_parallel_workers")
            hidden, width = row.number("n_embd"), row.number("n_expanded_embd")
            heads, kv_heads = row.number("n_head"), row.number("n_kv_head")
            dim = hidden // heads
            up = 2 if columns.get("use_gated_mlp") == "True" else 1
            shapes = {
                "attn_pre_proj": ((heads // tp + 2 * max(1, kv_heads // tp)) * dim, hidden),
                "attn_post_proj": (hidden, hidden // tp),
                "mlp_up_proj": (up * width // tp, hidden),
                "mlp_down_proj": (hidden, width // tp),
            }
            for name, (n, k) in shapes.items():
                text = columns.get(f"time_stats.{name}.median")
                if text:
                    yield tokens, n, k, _seconds(text, row.where)


def _seconds(text: str | None, where: str) -> float:
    try:
        found = float(text or "")
    except ValueError:
        found = 0.0
    if not found > 0.0:
        raise ConfigError(f"{where}: latency is {text!r}; it must be a number of ms above 0")
    return found * MILLI
