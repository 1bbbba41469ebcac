"""batch: interactive traffic at half of slo's capacity, without and with an offline batch on the same server.

The batch comes in by `/v1/files` and `/v1/batches`. Asked: do the interactive gaps stay inside their target, and does
the machine do more in all? Tokens are the server's own count, over the time in which interactive requests arrive.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from _interference.bench import START_S, Bench
from _interference.judge import at, first_tokens, lost, steady_gaps
from _interference.loads import Played, plan_of, play, rows_of, with_trace
from _interference.variants import SLO
from paceline.measure.plan import Load
from paceline.measure.prompts import WORDS
from paceline.measure.schedule import seeded

SHARE = 0.5  # of slo's capacity
BEGIN_S = 30.0  # for a batch to begin
PROMPT_WORDS, NEW_TOKENS = 150, 64


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    return {"batch": START_S + 2 * (bench.size.steady_s + 5.0) + 5.0}


def measure(bench: Bench) -> None:
    """Without, then with. Raises OutOfTime."""
    bench.measured("batch", planned(bench)["batch"], lambda: _run(bench))


def tell(bench: Bench) -> None:
    """Rows and ratios of what was measured."""
    found = bench.state.get("batch")
    if found is None:
        return
    bench.report.note("batch: full load", f"{found['full_load']['rate']:.3g}/s, {found['full_load']['is']}")
    report, itl_s = bench.report, bench.scenario.itl_s
    for name in ("without", "with"):
        row = found[name]
        report.add(f"{name} a batch: interactive p95 ITL / target (at most 1)", [row["itl_p95_s"] / itl_s], "x")
        report.add(f"{name} a batch: interactive p95 TTFT / target", [row["ttft_p95_s"] / bench.scenario.ttft_s], "x")
        report.add(f"{name} a batch: output of all", [row["tokens_per_s"]], "tokens/s")
        report.note(f"{name} a batch: interactive requests lost", row["lost"])
    ratio = found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"]
    report.add("output of all, with a batch / without (above 1)", [ratio], "x")
    report.note("batch requests answered meanwhile", f"{found['answered']} of {found['asked']}")


def _run(bench: Bench) -> dict[str, Any]:
    scratch = bench.state.scratch("batch files")
    flags = ["--default-class", "interactive", "--batch-dir", str(scratch)]
    with bench.serving(SLO, flags=flags) as url:
        without = _interactive(bench, url, "batch without")
        with httpx.Client(base_url=url, timeout=60.0) as http:
            batch = _start_batch(http, bench.size.batch_requests)
            beside = _interactive(bench, url, "batch with")
            state = http.get(f"/v1/batches/{batch}").raise_for_status().json()
            http.post(f"/v1/batches/{batch}/cancel")
    counts = state["request_counts"]
    return {
        "full_load": bench.full_load,
        "without": without,
        "with": beside,
        "answered": counts["completed"],
        "asked": counts["total"],
    }


def _interactive(bench: Bench, url: str, key: str) -> dict[str, Any]:
    load = Load(rate=SHARE * bench.full_rate, duration_s=bench.size.steady_s)
    plan = with_trace(plan_of(url, load, key), bench.state.folder / "lengths.jsonl", rows_of(bench.lengths))
    played = play(plan, bench.state.scratch(key))
    end_s = max(record.closed_s or 0.0 for record in played.records)
    return {
        "itl_p95_s": at(steady_gaps(played.records, 0.0, end_s), 95),
        "ttft_p95_s": at(first_tokens(played.records), 95),
        "tokens_per_s": _output_per_s(played, bench.size.steady_s),
        "lost": lost(played.records),
    }


def _output_per_s(played: Played, until_s: float) -> float:
    """Tokens a second that the server counted while requests arrived, whoever they were for."""
    read = [(row.t_s, row.values["generation_tokens"]) for row in played.folder.scrapes() if not row.error]
    inside = [(t_s, tokens) for t_s, tokens in read if 0.0 <= t_s <= until_s]
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    return (last - first) / (last_s - first_s)


def _start_batch(http: httpx.Client, requests: int) -> str:
    """Upload and begin; the id of a batch that runs."""
    model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    lines = "".join(json.dumps(_line(number, model)) + "\n" for number in range(requests))
    upload = {"file": ("requests.jsonl", lines.encode(), "application/jsonl")}
    file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).raise_for_status().json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: str = http.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    deadline = time.monotonic() + BEGIN_S
    while (status := http.get(f"/v1/batches/{batch}").json()["status"]) == "validating":
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if status != "in_progress":
        raise RuntimeError(f"the batch does not run: its status is {status}")
    return batch


def _line(number: int, model: str) -> dict[str, Any]:
    words = " ".join(seeded(f"batch:{number}").choices(WORDS, k=PROMPT_WORDS))
    body = {"model": model, "prompt": words, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
