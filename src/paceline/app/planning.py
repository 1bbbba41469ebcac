"""The options of `paceline plan`, one field each, and the case they make.

What makes the case is imported when it is made: the fields alone are read when `paceline` starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError
from paceline.measure.options import a_path

if TYPE_CHECKING:
    from paceline.core.protocols import CostModel
    from paceline.cost.catalogue import Chip, Model
    from paceline.cost.deployment import Deployment
    from paceline.plan.case import Case

_TRAFFIC, _LAYOUT, _MEMORY, _DRAFTS = "Traffic and promises", "Layout", "Memory and price", "Speculation"


def _option(panel: str, help: str) -> Any:  # noqa: A002  typer's own word
    return typer.Option(rich_help_panel=panel, help=help)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What may be said of a case. Durations are texts, such as 50ms."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A name from --list, a folder, a config.json, a .gguf file.")
    ] = None
    chip: Annotated[
        str | None, typer.Option("--chip", "-c", help="A name from --list, or a .toml file with one of your own.")
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Expect what `paceline calibrate` measured of this very deployment, not datasheets.",
            parser=a_path,
            metavar="PATH",
        ),
    ] = None
    context: Annotated[int, _option(_TRAFFIC, "Tokens that a decoding sequence holds.")] = 4096
    prompt: Annotated[int, _option(_TRAFFIC, "Tokens of a new request.")] = 1024
    output: Annotated[int, _option(_TRAFFIC, "Tokens of its answer.")] = 256
    batch: Annotated[int, _option(_TRAFFIC, "Sequences that decode together.")] = 8
    ttft: Annotated[str, _option(_TRAFFIC, "Promise: time to the first token.")] = "1s"
    itl: Annotated[str, _option(_TRAFFIC, "Promise: time between two tokens.")] = "50ms"
    stamps: Annotated[
        str | None, _option(_TRAFFIC, "SENT,FIRST,LAST of a real request, in seconds; --output says its tokens.")
    ] = None
    tp: Annotated[int, _option(_LAYOUT, "Tensor parallel.")] = 1
    pp: Annotated[int, _option(_LAYOUT, "Pipeline parallel.")] = 1
    uneven_stages: Annotated[bool, _option(_LAYOUT, "Let pipeline stages differ by a layer.")] = False
    ep: Annotated[int, _option(_LAYOUT, "Expert parallel, over the chips of tp and dp.")] = 1
    dp: Annotated[int, _option(_LAYOUT, "Copies of the attention in one engine.")] = 1
    weights: Annotated[str, _option(_LAYOUT, "bf16, fp8, int4, q4_k_m, 4.5bit; auto: as published.")] = "auto"
    kv_dtype: Annotated[str, _option(_LAYOUT, "bf16, fp8; auto: 16 bits.")] = "auto"
    chips_per_node: Annotated[int, _option(_LAYOUT, "Chips that the fast link joins; 0: as the catalogue says.")] = 0
    network_gbs: Annotated[float, _option(_LAYOUT, "GB/s between nodes, for each chip.")] = 50.0
    weights_gb: Annotated[float | None, _option(_MEMORY, "Size of the weights' file, where it is known.")] = None
    block_size: Annotated[int, _option(_MEMORY, "Tokens of a KV block.")] = 16
    utilization: Annotated[float, _option(_MEMORY, "Share of a chip's memory that is given out.")] = 0.9
    used_gb: Annotated[float | None, _option(_MEMORY, "What a chip has in use before the KV pool is made.")] = None
    factor: Annotated[float, _option(_MEMORY, "Rule of thumb: plan with the weights times this.")] = 1.8
    price: Annotated[float | None, _option(_MEMORY, "Of one chip for an hour.")] = None
    drafts: Annotated[int, _option(_DRAFTS, "Tokens drafted a step.")] = 4
    acceptance: Annotated[float, _option(_DRAFTS, "Chance that a draft is accepted.")] = 0.7
    draft_cost: Annotated[
        float | None, _option(_DRAFTS, "Time of a draft as a share of a step; else of one layer and the head.")
    ] = None


def case_of(options: PlanOptions) -> Case:
    """What the options ask about. ConfigError and ModelNotFound name what cannot be taken."""
    from paceline.measure.slo import parse_duration
    from paceline.plan.case import Case, Drafting, Pool, Targets, Traffic

    return Case(
        _deployment(options),
        Traffic(options.context, options.prompt, options.output, options.batch),
        Targets(ttft_s=parse_duration(options.ttft), itl_s=parse_duration(options.itl)),
        Pool(options.block_size, options.utilization, _bytes(options.used_gb), options.factor),
        Drafting(options.drafts, options.acceptance, options.draft_cost),
        price_per_hour=options.price,
        stamps=_stamps(options.stamps),
        measured=_measured(options.calibration),
        weights_bytes=_bytes(options.weights_gb),
    )


def catalogue() -> tuple[dict[str, Chip], dict[str, Model]]:
    """All chips and models, the user's own among them."""
    from paceline.cost.catalogue import chips, models, user_files

    files = user_files(os.environ)
    return chips(_of("chips", files)), models(_of("models", files))


def _deployment(options: PlanOptions) -> Deployment:
    from paceline.cost.catalogue import find_chip, find_model, user_files
    from paceline.cost.deployment import Deployment

    if options.model is None or options.chip is None:
        missing = " and ".join(f"--{name}" for name in ("model", "chip") if getattr(options, name) is None)
        raise ConfigError(f"{missing} must be given, as in --model llama-3-8b --chip l40s; --list names all")
    files = user_files(os.environ)
    return Deployment(
        find_model(options.model, _of("models", files)),
        find_chip(options.chip, _of("chips", files)),
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        dp=options.dp,
        weights=options.weights,
        kv=options.kv_dtype,
        chips_per_node=options.chips_per_node,
        network_gbs=options.network_gbs,
        uneven_stages=options.uneven_stages,
    )


def _measured(path: Path | None) -> CostModel | None:
    """The step times of a calibration file."""
    if path is None:
        return None
    from paceline.cost.fit import load_calibration

    return load_calibration(path).cost


def _of(kind: str, files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(path for path in files if path.stem == kind)


def _bytes(gb: float | None) -> float | None:
    return None if gb is None else gb * 1e9


def _stamps(text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        sent, first, last = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--stamps is {text!r}; write three numbers of seconds, such as 0,0.8,2.8") from None
    return sent, first, last
