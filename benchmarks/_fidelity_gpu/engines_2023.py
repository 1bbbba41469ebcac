"""Engines of 2023, launched kernel by kernel from Python: Sarathi's Yi-34B figures and Splitwise's Llama-2-70B ones.

Two rows tell how long the host of such an engine takes (batch 1: its launches; batch 128: a row's share); everything
else is predicted. Its prefills attend through paged kernels that were slower than today's: Sarathi says that attention
took 13.7 of 174.7 ms of a 1,024-token prefill. Beside launches and traffic that leaves its inner loop 0.14 of the
chip's peak, and that share is taken for prefills of all lengths.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from paceline.core.shape import StepShape
from paceline.cost.analytic import AnalyticCost, silicon_of
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.cost.efficiency import FAMILIES, Efficiency
from paceline.cost.host import HOSTS, Host

from .data import DATA

CONTEXT = 1024  # of a decoding row: the figure does not say; a thousand tokens change a row by 0.1 ms
# Sarathi-Serve (OSDI 2024), artifact, osdi-experiments/figure-2 and table-2: Yi-34B, two A100 80 GB PCIe, milliseconds.
DECODE_MS = {1: 46.8, 2: 47.5, 4: 48.8, 8: 69.7, 16: 77.3, 32: 87.9, 64: 127.8, 128: 189.3}
PREFILL_MS = {128: 48.1, 512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.0, 16384: 4408.0}
HYBRID_MS = {"1,024 prefill": 217.2, "1,021 prefill + 3 decodes": 217.6}
ATTENTION_SHARE = 0.14


class Row(NamedTuple):
    """One figure, milliseconds."""

    name: str
    real_ms: float
    ours_ms: float
    told: bool = False  # what the host's time was taken from

    @property
    def error(self) -> float:
        """Signed, relative."""
        return self.ours_ms / self.real_ms - 1.0


def yi() -> list[Row]:
    """Decodes by batch, prefills by length, and a prefill with decodes in its wake."""
    cost = yi_cost()
    rows = [
        Row(f"decode, batch {batch}", ms, _ms(cost, _decodes(batch, CONTEXT)), told=batch in (1, 128))
        for batch, ms in DECODE_MS.items()
    ]
    rows += [Row(f"prefill, {n} tokens", ms, _ms(cost, StepShape().plus(0, n))) for n, ms in PREFILL_MS.items()]
    alone, mixed = StepShape().plus(0, 1024), _decodes(3, CONTEXT).plus(0, 1021)
    rows += [
        Row(name, ms, _ms(cost, shape)) for (name, ms), shape in zip(HYBRID_MS.items(), (alone, mixed), strict=True)
    ]
    return rows


def yi_cost() -> AnalyticCost:
    """Its launches from a batch of one, a row's share from a batch of 128."""
    chip = find_chip("a100-pcie")
    deployment = Deployment(find_model("yi-34b"), chip, tp=2)
    family = FAMILIES[chip.family]
    slow = replace(family, prefill=replace(family.prefill, share=ATTENTION_SHARE))
    kernels = Efficiency(silicon_of(chip), slow)
    host = HOSTS["eager"]
    layers, most = deployment.model.layers, max(DECODE_MS)
    row_s = (DECODE_MS[most] - DECODE_MS[1]) / 1e3 / (most - 1)
    launch_s = (DECODE_MS[1] / 1e3 - row_s - host.step_s) / layers - host.layer_s
    return AnalyticCost(deployment, kernels, replace(host, row_s=row_s, launch_s=launch_s))


def splitwise() -> list[Row]:
    """Prompt and token times of Llama-2-70B, host times from the first batches of 1 and 64 of each machine."""
    rows = []
    for (chip, tp), points in _splitwise_points().items():
        deployment = Deployment(find_model("llama-2-70b"), find_chip(chip), tp=tp)
        cost = AnalyticCost(deployment, host=_told_host(deployment, points))
        for (prompt, batch, output), (prompt_ms, token_ms) in sorted(points.items()):
            shape = StepShape()
            for _ in range(batch):
                shape = shape.plus(0, prompt)
            name = f"{chip} tp{tp}, {prompt} tokens x {batch}"
            told = prompt == 512 and output == 128 and batch in (1, 64)
            rows.append(Row(f"prompt, {name}", prompt_ms, _ms(cost, shape)))
            rows.append(Row(f"token, {name}", token_ms, _ms(cost, _decodes(batch, prompt + output // 2)), told=told))
    return rows


def _told_host(deployment: Deployment, points: dict[tuple[int, int, int], tuple[float, float]]) -> Host:
    few, many = points[512, 1, 128][1] / 1e3, points[512, 64, 128][1] / 1e3
    row_s = max(0.0, (many - few) / 63)
    host = replace(HOSTS["eager"], row_s=row_s)
    launch_s = (few - row_s - host.step_s) / deployment.model.layers - host.layer_s
    return replace(host, launch_s=max(0.0, launch_s))


def _splitwise_points() -> dict[tuple[str, int], dict[tuple[int, int, int], tuple[float, float]]]:
    """(prompt, batch, output) -> median (prompt, token) ms, by machine; chips under a power cap are left out."""
    chips = {"a100-80gb": "a100", "h100-80gb": "h100"}
    found: dict[tuple[str, int], dict[tuple[int, int, int], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with (DATA / "splitwise_llama2_70b.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["hardware"] in chips:
                key = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
                machine = chips[row["hardware"]], int(row["tensor_parallel"])
                found[machine][key].append((float(row["prompt_time"]), float(row["token_time"])))
    return {
        machine: {
            key: (statistics.median(p for p, _ in values), statistics.median(t for _, t in values))
            for key, values in points.items()
        }
        for machine, points in found.items()
    }


def _decodes(rows: int, context: int) -> StepShape:
    return StepShape(rows, rows, rows * context)


def _ms(cost: AnalyticCost, shape: StepShape) -> float:
    return cost.predict(shape).seconds * 1e3
