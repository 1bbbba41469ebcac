"""The options of `paceline simulate`, one field each, and the engine and plan they make."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from paceline.app.settings import KVSettings, SchedulerSettings
from paceline.core.config import SchedulerConfig
from paceline.errors import ConfigError
from paceline.measure.options import BenchOptions, a_path, seconds, to_plan, usage_error
from paceline.measure.plan import BenchPlan

if TYPE_CHECKING:
    from paceline.cost.deployment import Deployment
    from paceline.cost.fit import Calibration
    from paceline.measure.metrics import RequestMetrics
    from paceline.simulate.fleet.file import FleetFile
    from paceline.simulate.many import FleetSetup
    from paceline.simulate.run import EngineSetup

GIB = 1 << 30
_ENGINE, _AROUND, _FLEET = "Engine", "Around the engine", "Several engines"
R = TypeVar("R")

# What of `paceline bench` has a meaning here: load, prompts and judging. A real client's needs do not.
LOAD_OPTIONS = (
    *("rate", "concurrency", "max_concurrency", "requests", "duration", "arrivals", "burstiness", "ramp_to"),
    *("burst_rate", "burst_every", "burst_for", "stagger", "trace", "trace_format", "trace_speed", "trace_skip"),
    *("trace_limit", "seed", "input", "output", "prompts", "prefix_tokens", "prefix_groups", "prefix_share", "turns"),
    *("think", "turn_input", "timeout", "gate", "slo", "price_per_hour", "out", "name", "as_json", "quiet"),
)


def _option(panel: str, help: str, *names: str) -> Any:  # noqa: A002  typer's own word
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=not names)


def _path(panel: str, help: str, *names: str) -> Any:  # noqa: A002
    return typer.Option(*names, rich_help_panel=panel, help=help, parser=a_path, metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What is simulated. Durations are texts, such as 16ms."""

    model: Annotated[
        str | None, _option(_ENGINE, "A name (`paceline plan --list`), a folder, config.json, .gguf.", "--model", "-m")
    ] = None
    chip: Annotated[str | None, _option(_ENGINE, "A name, or a .toml file with one of your own.", "--chip", "-c")] = (
        None
    )
    calibration: Annotated[
        Path | None, _path(_ENGINE, "Step times measured by `paceline calibrate`, in place of model and chip.")
    ] = None
    tp: Annotated[int, _option(_ENGINE, "Tensor parallel.")] = 1
    pp: Annotated[int, _option(_ENGINE, "Pipeline parallel; steps follow each other, they do not overlap.")] = 1
    uneven_stages: Annotated[bool, _option(_ENGINE, "Let pipeline stages differ by a layer.")] = False
    ep: Annotated[int, _option(_ENGINE, "Expert parallel, over the chips of tp.")] = 1
    weights: Annotated[str, _option(_ENGINE, "bf16, fp8, int4, q4_k_m, ...; auto: as published.")] = "auto"
    kv_dtype: Annotated[str, _option(_ENGINE, "bf16, fp8; auto: 16 bits.")] = "auto"
    num_blocks: Annotated[
        int | None, _option(_ENGINE, "KV blocks, as the real engine's log tells; without it they are worked out.")
    ] = None
    utilization: Annotated[
        float | None, _option(_ENGINE, "Share of a chip's memory that is given out, as vLLM counts it; else --kv-share")
    ] = None
    request_overhead: Annotated[
        str | None,
        _option(_AROUND, "From a client's send to the scheduler. Without it: the calibration's, or the chip family's."),
    ] = None
    response_overhead: Annotated[
        str | None, _option(_AROUND, "From the end of a step to the client's read. Without it: the calibration's, or 0")
    ] = None
    max_tokens: Annotated[
        int | None, _option(_AROUND, "What clients ask for where they get less; policies that reserve look at it.")
    ] = None
    class_share: Annotated[
        list[str] | None, _option(_AROUND, "CLASS=WEIGHT: classes of requests that name none. Repeatable.")
    ] = None
    jitter: Annotated[bool, _option(_AROUND, "Draw step times from their range instead of the expected time.")] = False
    oracle: Annotated[
        bool, _option(_AROUND, "The slo policy knows the hardware's law, instead of learning from steps.")
    ] = False
    overload_after: Annotated[
        str, _option(_AROUND, "Stop when those who wait would need longer than this to be started.")
    ] = "600s"


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How many engines, all alike."""

    replicas: Annotated[int, _option(_FLEET, "Engines behind one router.")] = 1
    router: Annotated[
        str, _option(_FLEET, "round_robin, least_load, power_of_two, prefix_aware, sticky or random.")
    ] = "least_load"
    prefill: Annotated[int, _option(_FLEET, "Engines for prompts alone, with --decode in place of --replicas.")] = 0
    decode: Annotated[int, _option(_FLEET, "Engines for all tokens after the first.")] = 0
    network_gbs: Annotated[float, _option(_FLEET, "GB/s of each engine, for KV that is handed over.")] = 50.0
    fleet_file: Annotated[
        Path | None,
        _path(_FLEET, "A .toml of engines that differ, tiers, outages, prices (docs/routing.md).", "--fleet"),
    ] = None


def fleet_of(options: FleetOptions, setup: EngineSetup) -> FleetSetup:
    """The fleet that the options describe. ConfigError names what cannot be."""
    from paceline.simulate.many import FleetSetup

    return FleetSetup(
        replicas=0 if options.prefill or options.decode else options.replicas,
        router=options.router,
        prefill=options.prefill,
        decode=options.decode,
        network_bytes_per_s=options.network_gbs * 1e9,
        kv_bytes_per_token=setup.kv_bytes_per_token,
        file=None if options.fleet_file is None else _file_of(options),
    )


def _file_of(options: FleetOptions) -> FleetFile:
    from paceline.simulate.fleet.file import load_fleet

    assert options.fleet_file is not None
    defaults = FleetOptions(fleet_file=options.fleet_file)
    if options != defaults:
        raise usage_error("engines and routers are in the file, and on the command line too", "--fleet")
    return load_fleet(options.fleet_file)


def plan_of(
    load: BenchOptions, setup: EngineSetup, fleet: FleetSetup | None = None, *, needs_load: bool = True
) -> BenchPlan:
    """The plan of a command line; its target is the simulated engine, or the fleet and its price."""
    plan = to_plan(f"simulated:{setup.target['model']}", load, needs_load=needs_load)
    price = fleet.price_per_hour(setup) if fleet is not None and plan.price_per_hour is None else None
    return plan if price is None else msgspec.structs.replace(plan, price_per_hour=price)


def notes_of(plan: BenchPlan, setup: EngineSetup, requests: Sequence[RequestMetrics] = ()) -> list[str]:
    """What to know of a simulation that is none of its results: what it took as it was asked, and a real engine won't.

    `requests` are those of its runs.
    """
    from paceline.measure.slo import format_seconds, parse_slos

    notes: list[str] = []
    longest = max((one.input_tokens or 0) + (one.output_tokens or 0) for one in requests) if requests else 0
    if 0 < setup.max_context < longest:
        notes.append(
            f"requests of up to {longest:,} tokens: the model was made for {setup.max_context:,}, and a real engine "
            "takes no more"
        )
    if not setup.asks:
        return notes
    kind = next(kind for kind in setup.config.classes if kind.name == setup.default_class)
    for slo in parse_slos(plan.slos):
        quantity = slo.metric.partition("_")[0]
        told_s = {"ttft": kind.ttft_s, "itl": kind.itl_s, "tpot": kind.itl_s, "e2e": kind.e2e_s}.get(quantity)
        if told_s is not None and slo.bound_s < told_s:
            key = {"tpot": "itl"}.get(quantity, quantity)
            wanted = json.dumps({kind.name: {f"{key}_ms": round(1000 * slo.bound_s, 6)}})
            notes.append(
                f"judged by {slo}, but class {kind.name} promises {format_seconds(told_s)} and {setup.config.policy} "
                f"works for that: --classes '{wanted}' tells it"
            )
    return notes


def setup_of(options: EngineOptions, scheduler: SchedulerSettings, kv: KVSettings) -> EngineSetup:
    """The engine that the options describe. ConfigError says what cannot be, and what could."""
    if options.calibration is None:
        return _analytic(options, scheduler, kv)
    from paceline.cost.fit import load_calibration

    return _calibrated(options, scheduler, kv, load_calibration(options.calibration))


def _analytic(options: EngineOptions, scheduler: SchedulerSettings, kv: KVSettings) -> EngineSetup:
    """From datasheets."""
    from paceline.cost.analytic import AnalyticCost
    from paceline.cost.catalogue import find_chip, find_model, user_files
    from paceline.cost.deployment import Deployment
    from paceline.simulate.overheads import Overheads
    from paceline.simulate.run import EngineSetup

    if options.model is None or options.chip is None:
        missing = " and ".join(f"--{name}" for name in ("model", "chip") if getattr(options, name) is None)
        raise ConfigError(
            f"{missing} must be given, such as --model llama-3-8b --chip h100 (`paceline plan --list` names what there "
            "is), or --calibration with a file that `paceline calibrate` has written"
        )
    files = user_files(os.environ)
    deployment = Deployment(
        find_model(options.model, _of("models", files)),
        find_chip(options.chip, _of("chips", files)),
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        weights=options.weights,
        kv=options.kv_dtype,
        uneven_stages=options.uneven_stages,
    )
    cost = AnalyticCost(deployment)
    blocks = _blocks(options, kv, deployment, scheduler)
    before, after = cost.request_s, 0.0
    if options.request_overhead is not None:
        before = seconds("--request-overhead", options.request_overhead)
    if options.response_overhead is not None:
        after = seconds("--response-overhead", options.response_overhead)
    most = blocks * kv.block_size
    return EngineSetup(
        config=_config(scheduler, kv, blocks, min(scheduler.max_model_len or most, most)),
        cost=cost,
        target={
            "model": deployment.model.name,
            "chip": deployment.chip.name,
            "layout": deployment.layout,
            "quantization": deployment.weights,
        },
        overheads=Overheads(before_s=before, after_s=after),
        kv_bytes_per_token=deployment.kv_bytes_per_token,
        max_context=deployment.model.max_context,
        **_around(options, scheduler),
    )


def _calibrated(
    options: EngineOptions, scheduler: SchedulerSettings, kv: KVSettings, calibration: Calibration
) -> EngineSetup:
    """From what was measured on a real engine: its step times, its memory, what lies around it."""
    from paceline.simulate.overheads import Overheads
    from paceline.simulate.run import EngineSetup

    engine = calibration.engine
    blocks = options.num_blocks or engine.get("num_blocks")
    if not blocks:
        raise ConfigError("the calibration does not say how many KV blocks its engine had: give --num-blocks")
    longest = scheduler.max_model_len or engine.get("max_model_len") or blocks * kv.block_size
    told = calibration.overheads
    before, token = told.before_s, told.before_token_s
    if options.request_overhead is not None:
        before, token = seconds("--request-overhead", options.request_overhead), 0.0
    after, row = told.after_s, told.after_row_s
    if options.response_overhead is not None:
        after, row = seconds("--response-overhead", options.response_overhead), 0.0
    return EngineSetup(
        config=_config(scheduler, kv, int(blocks), int(longest)),
        cost=calibration.cost,
        target={"model": str(engine.get("model", "calibrated")), "calibration": str(options.calibration)},
        overheads=Overheads(before, token, after, row),
        **_around(options, scheduler),
    )


def _around(options: EngineOptions, scheduler: SchedulerSettings) -> dict[str, Any]:
    from paceline.simulate.drive import Limits

    return {
        "limits": Limits(overload_s=_overload_s(options.overload_after)),
        "jitter": options.jitter,
        "oracle": options.oracle,
        "max_tokens": _max_tokens(options.max_tokens),
        "class_shares": _shares(options.class_share or (), [kind.name for kind in scheduler.classes]),
        "default_class": scheduler.default_class,
        "call_log": scheduler.call_log,
    }


def _config(scheduler: SchedulerSettings, kv: KVSettings, num_blocks: int, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=kv.block_size,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        prefix_caching=kv.prefix_caching,
        max_waiting=scheduler.max_waiting,
        policy=scheduler.policy,
        policy_options=scheduler.policy_options,
        classes=scheduler.classes,
    )


def _blocks(options: EngineOptions, kv: KVSettings, deployment: Deployment, scheduler: SchedulerSettings) -> int:
    """KV blocks: as given, as many as a size holds, or what the chip's memory leaves."""
    if options.num_blocks is not None:
        if options.num_blocks < 1:
            raise usage_error("at least one block", "--num-blocks")
        return options.num_blocks
    if kv.kv_gib is not None:
        return max(1, int(kv.kv_gib * GIB / (deployment.kv_bytes_per_token * kv.block_size)))
    whole = options.utilization is not None
    utilization = options.utilization if options.utilization is not None else kv.kv_share or 0.9
    memory = deployment.memory(
        block_size=kv.block_size,
        utilization=utilization,
        share_of="total" if whole else "free",
        step_tokens=scheduler.max_num_batched_tokens,
        max_rows=scheduler.max_num_seqs,
    )
    if memory.num_blocks < 1:
        deployment.require_fit(utilization=utilization)  # which says what would fit
        raise ConfigError(f"{deployment.layout} leaves no memory for KV: {memory.line()}")
    return memory.num_blocks


def _overload_s(text: str) -> float:
    value = seconds("--overload-after", text)
    if not value:
        raise usage_error("the time must be above 0", "--overload-after")
    return value


def _max_tokens(given: int | None) -> int | None:
    if given is not None and given < 1:
        raise usage_error(f"{given} is no length of an answer; at least one token", "--max-tokens")
    return given


def _shares(given: Iterable[str], classes: Sequence[str]) -> Mapping[str, float]:
    shares: dict[str, float] = {}
    for text in given:
        name, equals, weight = text.partition("=")
        try:
            shares[name.strip()] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not 0.0 <= shares[name.strip()] < math.inf:
            raise usage_error(f"{text!r} is not CLASS=WEIGHT, such as interactive=0.3", "--class-share")
        if name.strip() not in classes:
            raise usage_error(
                f"{name.strip()!r} is no class of traffic; there are {', '.join(classes)}", "--class-share"
            )
    if shares and not sum(shares.values()):
        raise usage_error("the weights are all 0; one at least must be above", "--class-share")
    return shares


def _of(kind: str, files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(path for path in files if path.stem == kind)
