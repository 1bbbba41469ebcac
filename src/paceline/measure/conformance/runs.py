"""Computed cases about whole runs: what is left out, what makes a run worthless, what a search answers."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.measure.capacity import Answer, SearchSettings, find_capacity
from paceline.measure.plan import Arrivals, BenchPlan, Load, Target, Trace
from paceline.measure.protocol import classify
from paceline.measure.records import Manifest, RequestRecord, Segment, Usage
from paceline.measure.summary import measure_run
from paceline.measure.traces import load_trace
from paceline.measure.verdict import findings, judge


def answered(i: int, at_s: float, ttft_ms: float, **fields: Any) -> RequestRecord:
    """A success of one token."""
    end = at_s + ttft_ms / 1e3
    return RequestRecord(
        id=str(i), index=i, scheduled_s=at_s, dispatched_s=at_s, written_s=at_s, closed_s=end, status=200,
        read_s=(end,), read_bytes=(1,), kinds="c", row_reads=(0,), row_chars=(1,), **fields,
    )  # fmt: skip


def _verdict(records: list[RequestRecord], load: Load) -> tuple[str, list[str]]:
    """(outcome, codes of its reasons) of a complete run of these records."""
    plan = BenchPlan(target=Target(url="http://127.0.0.1:1"), load=load)
    ended = Segment(index=0, t0_ns=0, t0_wall="", ended="complete")
    manifest = Manifest(run_id="case", created="", plan=plan.to_dict(), seed=0, segments=[ended])
    closed = load.arrivals is Arrivals.CLOSED
    run = measure_run(records, concurrency=load.concurrency, open_loop=not closed)
    found = findings(manifest, plan, records, run)
    return judge(found, []).outcome.value, [reason.code for reason in found]


def first_wave(given: dict[str, Any]) -> dict[str, Any]:
    """Slots that all ask at once, then go on one by one."""
    slots, rounds = given["slots"], given["rounds"]
    first, later = given["first_ttft_ms"], given["later_ttft_ms"]
    records = [answered(i, 0.0, first, first_wave=True) for i in range(slots)]
    for turn in range(rounds):
        at = (first + turn * later) / 1e3
        records += [answered(slots * (turn + 1) + i, at + 1e-4 * i, later) for i in range(slots)]
    run = measure_run(records, concurrency=slots, open_loop=False)
    ttft = run.latencies["ttft"]
    p99 = ttft.quantile(99.0)
    _, codes = _verdict(records, Load(arrivals=Arrivals.CLOSED, concurrency=slots, requests=len(records)))
    return {
        "n": ttft.n,
        "p99_ms": None if p99 is None or p99.value is None else round(1e3 * p99.value, 6),
        "requests": len(run.requests),
        "said": "first_wave" in codes,
    }


def warm_cache(given: dict[str, Any]) -> dict[str, Any]:
    """The same texts sent to one server twice: the second time it remembers them."""
    usage = Usage(prompt_tokens=given["prompt_tokens"], completion_tokens=1, cached_tokens=given["cached_tokens"])
    records = [answered(i, 0.1 * i, 50.0 + i % 7, usage=usage) for i in range(given["requests"])]
    outcome, codes = _verdict(records, Load(rate=10, requests=len(records)))
    return {"outcome": outcome, "said": "warm" in codes}


def trace_times(given: dict[str, Any]) -> dict[str, Any]:
    """A trace's own times, wherever they start; or that it is refused."""
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(f"{line}\n" for line in given["lines"]))
        try:
            rows = load_trace(Trace(path=str(path)))
        except ConfigError:
            return {"refused": True}
    return {"refused": False, "at_s": [None if row.at_s is None else round(row.at_s, 9) for row in rows]}


def capacity(given: dict[str, Any]) -> dict[str, Any]:
    """A search over a server that holds its promise up to one rate exactly."""
    holds_to = given["holds_up_to"]

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        return (Answer.HOLDS if rate <= holds_to else Answer.FAILS), "", ""

    settings = SearchSettings(low=given["low"], high=given["high"], resolution=0.05)
    best = find_capacity(trial, settings).best
    return {"found": best is not None, "right": best is None or holds_to / 1.05 <= best <= holds_to}


_DESCRIPTORS = """
import resource, sys
from paceline.errors import ConfigError
from paceline.measure.limits import check_limits
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print("raised" if check_limits(connections, 1)["open_files"] >= connections else "short")
except ConfigError:
    print("refused")
"""


def descriptors(given: dict[str, Any]) -> dict[str, Any]:
    """More connections than a process may open files; in a process of its own, whose limit can be lowered."""
    numbers = [str(given[key]) for key in ("soft", "hard", "connections")]
    command = [sys.executable, "-c", _DESCRIPTORS, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  ourselves
    return {"outcome": done.stdout.strip() or done.stderr[-200:]}


def client_limit(given: dict[str, Any]) -> dict[str, Any]:
    """An error of the client's own machine, once in a run that is fine otherwise."""
    number = getattr(errno, given["errno"])
    error, message = classify(OSError(number, "x"))
    bad = RequestRecord(
        id="bad", index=0, scheduled_s=99.0, dispatched_s=99.0, closed_s=99.1, error=error, error_message=message
    )
    outcome, _ = _verdict([*(answered(i, 0.1 * i, 50.0 + i % 7) for i in range(200)), bad], Load(rate=10, requests=201))
    return {"error": error.value, "outcome": outcome}


KINDS = {
    "first_wave": first_wave,
    "warm_cache": warm_cache,
    "trace_times": trace_times,
    "capacity": capacity,
    "descriptors": descriptors,
    "client_limit": client_limit,
}
