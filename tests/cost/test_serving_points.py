"""Measured servings of dense models on H100: tokens a second of real engines, from nothing but datasheets.

The rows are AIConfigurator's (`serving_points.csv`): TensorRT-LLM and vLLM, closed loop. While a request decodes, each
of the others brings its prompt once, so a step's mean time is a decode's and the prompts' share. This guards the
sum; whole servings, queues and all, are the simulator's to answer.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from paceline.core.shape import StepShape
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment

FOLDERS = [Path(__file__).parents[up] / "shared" / "data" for up in (2, 3)]


def points() -> list[dict[str, str]]:
    path = next(
        (folder / "serving_points.csv" for folder in FOLDERS if (folder / "serving_points.csv").is_file()), None
    )
    if path is None:
        pytest.skip("the measured servings are not beside this checkout")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # SGLang's rows were sent as a burst and are limited by memory; the few of vLLM in fp8 do not say how KV is kept.
    return [
        row
        for row in rows
        if row["system"] == "h100_sxm"
        and (row["backend"] == "trtllm" or (row["backend"] == "vllm" and not row["gemm_quant_mode"]))
    ]


def predicted(row: dict[str, str]) -> tuple[float, float, float]:
    """(seconds between tokens, low, high)."""
    weights = "fp8" if row["gemm_quant_mode"].startswith("fp8") else "auto"
    model, chip = find_model(row["model_path"]), find_chip(row["system"])
    cost = AnalyticCost(Deployment(model, chip, tp=int(row["tp_size"]), weights=weights))
    prompt, output, batch = int(row["isl"]), int(row["osl"]), int(row["batch_size"])
    decode = cost.predict(StepShape(batch, batch, batch * (prompt + output // 2)))
    prefill = cost.predict(StepShape().plus(0, prompt))
    share = (batch - 1) / output
    return (
        decode.seconds + share * prefill.seconds,
        decode.low + share * prefill.low,
        decode.high + share * prefill.high,
    )


def test_time_between_tokens() -> None:
    errors, inside = [], 0
    rows = points()
    for row in rows:
        seconds, low, high = predicted(row)
        real = float(row["silicon_tpot_ms"]) / 1e3
        errors.append(abs(seconds / real - 1.0))
        inside += low <= real <= high
    assert len(rows) > 400
    assert statistics.median(errors) < 0.20
    assert inside / len(rows) > 0.80
