"""What every benchmark shares: `--quick`, `--json FILE`, min/median/max rows, the machine and its measured limits."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def arguments(doc: str | None, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """The two flags every benchmark takes, and whatever `add` puts to them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute at most: fewer repeats, smaller sizes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure here")
    if add is not None:
        add(parser)
    return parser.parse_args()


class Report:
    """Rows of repeated measurements, printed as they come and written as JSON at the end."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self._json: Path | None = args.json
        self._quick: bool = args.quick
        self._rows: list[dict[str, Any]] = []
        self._notes: dict[str, Any] = {}
        print(f"{name}: {'quick' if args.quick else 'full'} run on {cpu_name()}, {os.cpu_count()} CPUs")
        print(f"{'':<58}{'min':>10}{'median':>10}{'max':>10}")

    def add(self, label: str, values: Sequence[float], unit: str) -> float:
        """One row; its median."""
        low, middle, high = min(values), statistics.median(values), max(values)
        self._rows.append({"label": label, "unit": unit, "min": low, "median": middle, "max": high, "n": len(values)})
        print(f"{f'{label} [{unit}]':<58}{low:>10.4g}{middle:>10.4g}{high:>10.4g}", flush=True)
        return middle

    def note(self, key: str, value: Any, *, show: bool = True) -> None:
        """A fact that belongs to the run: a setting, a verdict, a count. `show` is off for what was printed already."""
        self._notes[key] = value
        if show:
            print(f"{key}: {value}", flush=True)

    def finish(self) -> None:
        """Write the JSON file, if one was asked for."""
        if self._json is None:
            return
        found = {
            "benchmark": self.name,
            "quick": self._quick,
            "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "platform": platform.platform()},
            "python": sys.version.split()[0],
            "paceline": version("paceline"),
            "rows": self._rows,
            "notes": self._notes,
        }
        self._json.write_text(json.dumps(found, indent=1) + "\n")


def cpu_name() -> str:
    """The processor's own name for itself, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one that is thrown away."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_limits(report: Report, *, repeats: int = 7) -> tuple[float, float]:
    """This machine's own limits now: (bytes/s read from memory, float32 operations/s of a matrix multiply)."""
    import torch

    data = torch.ones(64 * 2**20)  # 256 MiB: far beyond the caches
    bandwidth = [data.nbytes / seconds for seconds in timed(data.sum, repeats)]
    size = 1024
    a, b = torch.rand(size, size), torch.rand(size, size)
    flops = [2 * size**3 / seconds for seconds in timed(lambda: a @ b, repeats)]
    report.add("memory read, all threads", [value / 1e9 for value in bandwidth], "GB/s")
    report.add("float32 matrix multiply, all threads", [value / 1e9 for value in flops], "GFLOP/s")
    return statistics.median(bandwidth), statistics.median(flops)
