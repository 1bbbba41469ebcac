"""cost: how far the online cost model is off in steady traffic, as /metrics tells it.

slo under half its capacity. A reading is the median and the 95th percentile of |predicted - real| / real over the last
256 steps of each kind (decodes alone, with a prefill). The first third of the readings is the model settling in.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from _interference.bench import START_S, Bench
from _interference.loads import plan_of, play, rows_of, with_trace
from _interference.variants import SLO
from paceline.measure.plan import Load

SHARE = 0.5  # of slo's capacity
EVERY_S = 2.0
NAMES = {"median": "paceline:step_prediction_error_median", "p95": "paceline:step_prediction_error_p95"}


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    return {"cost": START_S + bench.size.steady_s + 5.0}


def measure(bench: Bench) -> None:
    """One run, read every two seconds. Raises OutOfTime."""
    bench.measured("cost", planned(bench)["cost"], lambda: _run(bench))


def tell(bench: Bench) -> None:
    """Rows of what was measured."""
    found = bench.state.get("cost")
    if found is None:
        return
    bench.report.note("cost: full load", f"{found['full_load']['rate']:.3g}/s, {found['full_load']['is']}")
    settled = found["readings"][len(found["readings"]) // 3 :]
    for name, target in (("median", " (target: at most 10)"), ("p95", "")):
        bench.report.add(f"error of a step's predicted time, {name}{target}", [100 * row[name] for row in settled], "%")


def _run(bench: Bench) -> dict[str, Any]:
    load = Load(rate=SHARE * bench.full_rate, duration_s=bench.size.steady_s)
    over = threading.Event()
    readings: list[dict[str, float]] = []
    with bench.serving(SLO) as url:

        def read_on() -> None:
            with httpx.Client(timeout=5.0) as http:
                while not over.wait(EVERY_S):
                    found = read(http.get(f"{url}/metrics").text)
                    if found is not None:
                        readings.append(found)

        reader = threading.Thread(target=read_on, daemon=True)
        reader.start()
        try:
            plan = with_trace(plan_of(url, load, "cost"), bench.state.folder / "lengths.jsonl", rows_of(bench.lengths))
            play(plan, bench.state.scratch("cost"))
        finally:
            over.set()
            reader.join()
    if not readings:
        raise RuntimeError("/metrics told no error of the predictions during the run")
    return {"full_load": bench.full_load, "readings": readings}


def read(text: str) -> dict[str, float] | None:
    """Median and p95 of a Prometheus text; None before any step was predicted."""
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    found = {name: samples.get(full, math.nan) for name, full in NAMES.items()}
    return None if any(map(math.isnan, found.values())) else found
