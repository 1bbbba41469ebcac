"""How near the simulator and its analytic cost model come to engines measured on GPUs, and where they do not.

    python benchmarks/fidelity_gpu.py [--quick] [--json FILE] [--only vllm,serving,2023]

vllm     a vLLM 0.19 run on an RTX 4090, request by request, overloaded: first from datasheet and default efficiencies
         alone, then with one factor found on the first 150 requests and judged on the last 150.
serving  686 published servings on H100, H200 and GB200 (vLLM, TensorRT-LLM, SGLang; dense and mixtures of experts):
         time between tokens and to the first token, each row simulated as a closed loop. The distribution of errors by
         group, and over all.
2023     Sarathi's Yi-34B figures and, held out, Splitwise's Llama-2-70B ones: engines that launch kernel by kernel.

Nothing is fitted on these rows but what `_fidelity_gpu/` names. Every constant is in docs/efficiency.md; the kernels
below are judged in tests/cost/test_kernel_tables.py. About ten minutes; --quick takes one and a sample of the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from _common import arguments
from _fidelity_gpu import engines_2023, serving, vllm_run
from _fidelity_gpu.data import DATA, spread_of

# Bounds that the project set itself beforehand.
BEFORE = {"tpot_s": 0.15, "e2e_s": 0.15, "ttft_p90_s": 0.30}
AFTER = {"tpot_s": 0.05, "e2e_s": 0.05, "ttft_p50_s": 0.15, "ttft_p90_s": 0.15}
MEDIAN_TPOT = 0.20
YI = 0.20
SAMPLE = 17  # every so many rows of `serving` with --quick
QUICK_OUTPUT = 512  # longest answer of a row that --quick simulates

Verdicts = dict[str, bool]


def main() -> int:
    args = arguments(__doc__, _add_only)
    if not DATA.is_dir():
        print(f"no measurements at {DATA}", file=sys.stderr)
        return 2
    chosen = args.only.split(",")
    found: dict[str, Any] = {}
    met: Verdicts = {}
    for name, part in (("vllm", vllm), ("serving", servings), ("2023", of_2023)):
        if name in chosen:
            found[name] = part(args.quick, met)
    print("\nbounds: " + ", ".join(f"{name} {'met' if ok else 'MISSED'}" for name, ok in met.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({"quick": args.quick, **found, "met": met}, indent=1) + "\n")
    return 0


def _add_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="vllm,serving,2023", help="parts to run, with commas between")


def vllm(quick: bool, met: Verdicts) -> dict[str, Any]:
    """Before and after one factor."""
    cost = vllm_run.cost_model()
    real, ours = vllm_run.measured(), vllm_run.simulated(cost)
    print("vLLM 0.19, Llama-3.1-8B on an RTX 4090, 300 requests; seconds, real | simulated | error")
    print(" from the datasheet:")
    errors = _compare(ours, real)
    met |= {f"vllm {name}": abs(errors[name]) <= bound for name, bound in BEFORE.items()}
    first, last = range(150), range(150, 300)
    scaled = vllm_run.calibrated(cost, first)
    real_last, ours_last = vllm_run.measured(last), vllm_run.simulated(scaled, last)
    print(f" last 150, steps x {scaled.factor:.3f} by the first 150:")
    after = _compare(ours_last, real_last)
    met |= {f"vllm calibrated {name}": abs(after[name]) <= bound for name, bound in AFTER.items()}
    return {
        "datasheet": {"real": asdict(real), "ours": asdict(ours), "errors": errors},
        "calibrated": {"factor": scaled.factor, "real": asdict(real_last), "ours": asdict(ours_last), "errors": after},
    }


def _compare(ours: vllm_run.Figures, real: vllm_run.Figures) -> dict[str, float]:
    errors = ours.errors(real)
    for name, error in errors.items():
        print(f"  {name:<12}{getattr(real, name):>10.4g}{getattr(ours, name):>10.4g}{error:>+9.1%}")
    return errors


def servings(quick: bool, met: Verdicts) -> dict[str, Any]:
    """Every row, or a sample."""
    points = serving.points()
    if quick:
        points = tuple(point for point in points if point.output <= QUICK_OUTPUT)[::SAMPLE]
    rows: list[dict[str, Any]] = []
    for done, point in enumerate(points, start=1):
        ours = serving.predict(point)
        rows.append(
            {
                "row": point.name,
                "group": point.group,
                "tpot": ours.tpot_s / point.tpot_s - 1.0,
                "ttft": ours.ttft_s / point.ttft_s - 1.0,
                "ours": ours._asdict(),
                "real": {"ttft_s": point.ttft_s, "tpot_s": point.tpot_s},
            }
        )
        if sys.stderr.isatty():
            print(f"\r{done} of {len(points)}", end="", file=sys.stderr, flush=True)
    print(f"\nservings: {len(rows)} rows; errors of the time between tokens | to the first token")
    print(f"{'':<64}{'rows':>5}{'bias':>8}{'median':>8}{'p90':>8}  |{'bias':>8}{'median':>8}{'p90':>8}")
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    for name, group in [*sorted(groups.items()), ("all", rows)]:
        tpot, ttft = (spread_of([row[metric] for row in group]) for metric in ("tpot", "ttft"))
        figures = "".join(f"{tpot[key]:>+8.1%}" if key == "bias" else f"{tpot[key]:>8.1%}" for key in SHOWN)
        others = "".join(f"{ttft[key]:>+8.1%}" if key == "bias" else f"{ttft[key]:>8.1%}" for key in SHOWN)
        print(f"{name:<64}{len(group):>5}{figures}  |{others}")
    spread = {metric: spread_of([row[metric] for row in rows]) for metric in ("tpot", "ttft")}
    met["servings median tpot"] = spread["tpot"]["median"] <= MEDIAN_TPOT
    return {"rows": rows, "spread": spread}


SHOWN = ("bias", "median", "p90")


def of_2023(quick: bool, met: Verdicts) -> dict[str, Any]:
    """Yi-34B row by row, Llama-2-70B by machine."""
    yi = engines_2023.yi()
    print("\nYi-34B on two A100 PCIe (Sarathi); ms, real | ours | error (*: what the host's time was taken from)")
    for row in yi:
        print(f"  {row.name:<32}{row.real_ms:>9.1f}{row.ours_ms:>9.1f}{row.error:>+9.1%}{' *' if row.told else ''}")
    for row in yi:
        met[f"yi {row.name}"] = abs(row.error) <= YI
    splitwise = [row for row in engines_2023.splitwise() if not row.told]
    print("\nLlama-2-70B (Splitwise), held out; errors")
    groups = defaultdict(list)
    for row in splitwise:
        groups[row.name.rsplit(",", 1)[0]].append(row.error)
    for name, errors in sorted(groups.items()):
        spread = spread_of(errors)
        print(f"  {name:<24}{len(errors):>4} rows, bias {spread['bias']:+.1%}, median {spread['median']:.1%}")
    return {"yi": [row._asdict() for row in yi], "splitwise": [row._asdict() for row in splitwise]}


if __name__ == "__main__":
    sys.exit(main())
