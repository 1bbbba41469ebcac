"""What a system needs: memory beyond its imports, and time from its start to the first token."""

from __future__ import annotations

import time
from typing import Any

import httpx

from _cpu.bench import Bench, prompts
from _cpu.models import DEFAULT
from _cpu.systems import STARTED, SYSTEMS, Room, System

STREAMS, NEW = 16, 16  # of the memory part, beside a prompt as long as in prefill


def measure_memory(bench: Bench) -> None:
    """A worker that has computed a long prompt and a batch, then ends."""
    size = bench.size

    def work(system: System, repeat: int) -> dict[str, Any]:
        worker = bench.start(system, DEFAULT, Room(STREAMS, max(size.prefill, size.served_in) + NEW + 16))
        try:
            worker.run(prompts("memory", 1, size.prefill), 2)
            found = worker.run(prompts("memory", STREAMS, size.served_in), NEW)
        finally:
            worker.close()
        loaded = worker.loaded
        return {"peak_bytes": found["peak_bytes"], "imported_bytes": loaded["imported_bytes"], **loaded["facts"]}

    names = tuple(name for name in SYSTEMS if name in STARTED or SYSTEMS[name].peer == "transformers")
    bench.each("memory", names, work, repeats=1)


def measure_start(bench: Bench) -> None:
    """From the start of a server to the first token of an answer. The first start fills caches and is not counted."""
    room = Room(4, 1024)

    def work(system: System, repeat: int) -> dict[str, Any]:
        busy, begin_s = bench.quiet(), time.perf_counter()
        with bench.serving(system, DEFAULT, room) as (url, _):
            model = httpx.get(f"{url}/v1/models", timeout=60.0).raise_for_status().json()["data"][0]["id"]
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
            httpx.post(f"{url}/v1/completions", json=body, timeout=300.0).raise_for_status()
            seconds = time.perf_counter() - begin_s
        return {"seconds": seconds, "busy": busy}

    bench.each("start", STARTED, work, repeats=bench.repeats + 1)


def tell_memory(bench: Bench) -> None:
    """Megabytes beyond the imports, and over weights and KV where a system tells both."""
    for name in SYSTEMS:
        for found in bench.values("memory", name):
            more = found["peak_bytes"] - found["imported_bytes"]
            bench.report.add(f"memory: {name}, beyond its imports", [more / 1e6], "MB")
            bench.report.add(f"memory: {name}, imports", [found["imported_bytes"] / 1e6], "MB")
    for name in SYSTEMS:
        ratios = memory_ratios(bench, name)
        if ratios:
            bench.report.add(f"memory: {name}, over weights + KV", ratios, "x")


def memory_ratios(bench: Bench, name: str) -> list[float]:
    """What came beyond the imports over weights and KV."""
    return [
        (found["peak_bytes"] - found["imported_bytes"]) / (found["weights_bytes"] + found["kv_bytes"])
        for found in bench.values("memory", name)
        if "weights_bytes" in found and "kv_bytes" in found
    ]


def start_seconds(bench: Bench, name: str) -> list[float]:
    """Of all starts but the first."""
    return [found["seconds"] for found in bench.values("start", name)[1:]]


def tell_start(bench: Bench) -> None:
    """Seconds to the first token."""
    for name in STARTED:
        if seconds := start_seconds(bench, name):
            bench.report.add(f"second start to first token: {name}", seconds, "s")
