"""The pack's load cases: was the stated load really sent? Judged from what the server received.

Each request is answered with one token after `answer_ms`, so that requests in flight follow from the times they came.
Requests before the last `requests` of them are a client's probes and warm-up; they count for repeated prompts alone.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.measure import stats
from paceline.measure.mock import MockServer
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target

DISPERSION_BIN_S = 0.1


class LoadAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load that a client is told to send."""

    arrivals: str
    requests: int
    rate: float | None = None
    concurrency: int | None = None
    workers: int = 1
    warmup: int = 0
    input_tokens: int = 32  # of each prompt, as the server counts: words of the request


class LoadCase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One load case. `expect`: the range of each figure of `judge`."""

    id: str
    title: str
    why: str
    load: LoadAsked
    answer_ms: float
    expect: dict[str, tuple[float, float]]


def load_load_cases() -> list[LoadCase]:
    """All load cases of the pack."""
    raw = (files("paceline.measure.conformance") / "cases" / "load.json").read_bytes()
    return msgspec.json.decode(raw, type=list[LoadCase])


def judge(case: LoadCase, received: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Figures of a load from the requests as they came: `{"at_s": seconds, "body": {...}}`, in order."""
    times = [entry["at_s"] for entry in received[-case.load.requests :]]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    spread = stats.standard_deviation(gaps)
    prompts = [repr(entry["body"].get("messages", entry["body"].get("prompt"))) for entry in received]
    busy_s = case.answer_ms / 1e3
    return {
        "requests": float(len(times)),
        "rate": (len(times) - 1) / span if span > 0.0 else None,
        "gap_sd_ms": None if spread is None else 1e3 * spread,
        "dispersion": stats.dispersion(times, DISPERSION_BIN_S),
        "in_flight_100ms": float(sum(when <= times[0] + 0.1 for when in times)) if times else None,
        "max_in_flight": max((float(_busy(times, i, busy_s)) for i in range(len(times))), default=None),
        "repeated_prompts": float(len(prompts) - len(set(prompts))),
    }


def _busy(times: Sequence[float], i: int, busy_s: float) -> int:
    """Requests in flight when the i-th came: those that came less than the answer's time before it, and itself."""
    return sum(times[i] - busy_s < when for when in times[: i + 1])


def wrong_figures(case: LoadCase, received: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each figure outside its range."""
    if len(received) < case.load.requests:
        return [f"{case.id} requests: expected {case.load.requests}, got {len(received)}"]
    found = judge(case, received)
    lines = []
    for name, (low, high) in case.expect.items():
        value = found[name]
        if value is None or not low <= value <= high:
            lines.append(
                f"{case.id} {name}: expected {low:g} to {high:g}, got {value if value is None else f'{value:g}'}"
            )
    return lines


class ServerThread:
    """The pack's server on an event loop of its own. A context manager; `api` is safe to read once the load is over."""

    def __init__(self) -> None:
        from paceline.measure.conformance.server import ConformanceApi

        self.api = ConformanceApi()
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        async with MockServer(self.api) as server:
            self.url = server.url
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


def plan_of(case: LoadCase, url: str) -> BenchPlan:
    """Our own client's plan for a case."""
    asked = case.load
    return BenchPlan(
        target=Target(url=f"{url}/case/{case.id}/v1", metrics_url=""),
        load=Load(
            arrivals=Arrivals(asked.arrivals), rate=asked.rate, concurrency=asked.concurrency, requests=asked.requests
        ),
        prompts=Prompts(input=Length(value=asked.input_tokens), output=Length(value=1)),
        client=ClientPlan(workers=asked.workers, self_check=False, warmup_requests=asked.warmup, keep_text=False),
    )


def run_load_cases(cases: Sequence[LoadCase]) -> list[str]:
    """Send every case's load with our own client, one after another; lines about what was wrong."""
    from paceline.measure.runner import run

    lines: list[str] = []
    with ServerThread() as server, tempfile.TemporaryDirectory(prefix="paceline-load-") as folder:
        for case in cases:
            run(plan_of(case, server.url), Path(folder) / case.id)
            lines += wrong_figures(case, server.api.received(case.id))
    return lines
