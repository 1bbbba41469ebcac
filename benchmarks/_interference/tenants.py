"""tenants: two of them, known by their API keys; one always has more requests waiting than the machine can take.

The other sends a quarter of slo's capacity, first alone, then beside the flood: what becomes of its first tokens?
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from _interference.bench import START_S, Bench
from _interference.judge import at, first_tokens, lost
from _interference.loads import UNTIL_STOPPED_S, plan_of, play, play_beside, rows_of, with_trace
from _interference.variants import BY_NAME, SLO, Variant
from paceline.measure.plan import Arrivals, Load
from paceline.serve.keys import hash_key, new_key

QUIET = 0.25  # of slo's capacity
POLICIES = ("slo", "vllm")  # vllm for scale: one queue for everybody


def planned(bench: Bench) -> dict[str, float]:
    """Keys and seconds of what this part measures."""
    about_s = 2 * START_S + 2 * bench.size.quiet_requests / (QUIET * bench.full_rate) + 30.0
    return {f"tenants {name}": about_s for name in POLICIES}


def measure(bench: Bench) -> None:
    """Alone and flooded, on one server each. Raises OutOfTime."""
    about = planned(bench)
    for name in POLICIES:
        key = f"tenants {name}"
        bench.measured(key, about[key], partial(_run, bench, BY_NAME[name], key))


def tell(bench: Bench) -> None:
    """Rows and ratios of what was measured."""
    for name in POLICIES:
        found = bench.state.get(f"tenants {name}")
        if found is None:
            continue
        alone, flooded = at(found["alone_s"], 95), at(found["flooded_s"], 95)
        target = " (target: at most 1.5)" if name == SLO.name else ""
        bench.report.add(f"{name}: quiet tenant's p95 TTFT, flooded / alone{target}", [flooded / alone], "x")
        bench.report.note(f"{name}: quiet tenant's p95 TTFT alone, flooded", f"{alone:.3g} s, {flooded:.3g} s")
        bench.report.note(f"{name}: quiet tenant's requests lost", found["lost"])
        full = found["full_load"]
        bench.report.note(f"{name}: the quiet tenant sends a quarter of", f"{full['rate']:.3g}/s, {full['is']}")


def write_keys(folder: Path) -> tuple[Path, dict[str, str]]:
    """A key file for the server, and where the client finds each tenant's key. Readable by this user alone."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, places = [], {}
    for tenant in ("quiet", "flood"):
        secret, file = new_key(), folder / f"{tenant}.key"
        file.touch(mode=0o600)
        file.write_text(secret)
        entries.append(f'[[key]]\nname = "{tenant}"\nsha256 = "{hash_key(secret)}"\ntenant = "{tenant}"\n')
        places[tenant] = f"file:{file}"
    keys = folder / "keys.toml"
    keys.write_text("\n".join(entries))
    return keys, places


def _run(bench: Bench, variant: Variant, key: str) -> dict[str, Any]:
    size, state = bench.size, bench.state
    rate = QUIET * bench.full_rate
    keys, places = write_keys(state.scratch(f"{key} keys"))
    quiet = Load(rate=rate, requests=size.quiet_requests)
    flood = Load(arrivals=Arrivals.CLOSED, concurrency=size.flood_slots, duration_s=UNTIL_STOPPED_S)
    lengths = bench.lengths

    with bench.serving(variant, flags=["--no-batches", "--api-key-file", str(keys)]) as url:

        def plan(load: Load, tenant: str, salt: str) -> Any:
            made = plan_of(url, load, f"{key}:{salt}", tenant_keys={tenant: places[tenant]})
            return with_trace(made, state.folder / f"{tenant}.jsonl", rows_of(lengths, tenant=tenant))

        alone = play(plan(quiet, "quiet", "alone"), state.scratch(f"{key} alone"))
        flooded, _ = play_beside(
            plan(quiet, "quiet", "flooded"),
            state.scratch(f"{key} flooded"),
            plan(flood, "flood", "flood"),
            state.scratch(f"{key} flood"),
        )
    return {
        "full_load": bench.full_load,
        "alone_s": first_tokens(alone.records),
        "flooded_s": first_tokens(flooded.records),
        "lost": lost(alone.records) + lost(flooded.records),
    }
