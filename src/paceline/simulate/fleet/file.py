"""A fleet as a TOML file: engines of several kinds, routers, tiers, outages, prices.

    router = "prefix_aware"

    [[engines]]
    name = "prefill"
    count = 2
    role = "prefill"                 # whole | prefill | decode
    chip = "h100"                    # model, chip and what else is left out: of the command line
    tp = 2
    price_per_chip_hour = 3.0
    cold_start_s = 40.0

    [[engines]]
    name = "decode"
    count = 4
    role = "decode"
    chip = "l40s"
    speculation = { acceptance = [0.8, 0.6, 0.5], draft_share = 0.03 }

    [[tiers]]
    name = "host"
    capacity_tokens = 2_000_000
    gbs = 25.0

    [[outages]]
    engine = "decode-1"
    at_s = 60.0
    down_s = 30.0

An unknown field is refused, with its place in the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.errors import ConfigError
from paceline.route.policies.registry import make_router
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.faults import Outage, Retry, drawn_outages
from paceline.simulate.fleet.link import LinkSpec
from paceline.simulate.fleet.speculation import Speculation
from paceline.simulate.fleet.tiers import TierSpec

Options = dict[str, bool | int | float | str]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class DraftEntry(_Entry, frozen=True):
    """`speculation` of an engine: see `Speculation`."""

    acceptance: tuple[float, ...]
    draft_share: float = 0.0


class EngineEntry(_Entry, frozen=True):
    """`count` engines alike, named NAME-0, NAME-1 and so on. None: as the command line says."""

    name: str
    count: int = 1
    role: Role = Role.WHOLE
    model: str | None = None
    chip: str | None = None
    tp: int = 1
    ep: int = 1
    weights: str = "auto"
    kv: str = "auto"
    utilization: float = 0.9
    num_blocks: int | None = None
    policy: str | None = None
    policy_options: Options = {}
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    price_per_chip_hour: float | None = None
    cold_start_s: float = 0.0
    network_gbs: float = 50.0
    network_latency_s: float = 1e-4
    speculation: DraftEntry | None = None


class TierEntry(_Entry, frozen=True):
    """A place for KV outside the chips: see `TierSpec`."""

    name: str
    capacity_tokens: int
    gbs: float
    latency_s: float = 1e-4
    shared: bool = False
    always: bool = False


class OutageEntry(_Entry, frozen=True):
    """One engine dies once."""

    engine: str
    at_s: float
    down_s: float = inf  # it never comes back


class FailuresEntry(_Entry, frozen=True):
    """Outages drawn at random for every engine, until `until_s`."""

    mtbf_s: float
    down_s: float
    until_s: float


class RetryEntry(_Entry, frozen=True):
    """What becomes of requests whose engine died: see `Retry`."""

    on_loss: str = "retry"
    most: int = 3
    wait_s: float = 0.0


class FleetFile(_Entry, frozen=True):
    """The whole file."""

    engines: tuple[EngineEntry, ...]
    router: str = "least_load"
    router_options: Options = {}
    decode_router: str = "least_load"
    decode_router_options: Options = {}
    layerwise: bool = False  # KV leaves layer by layer, beside the prefill
    cold: bool = False  # every engine begins with its cold start
    tiers: tuple[TierEntry, ...] = ()
    outages: tuple[OutageEntry, ...] = ()
    failures: FailuresEntry | None = None
    retry: RetryEntry = RetryEntry()


@dataclass(frozen=True, slots=True)
class Base:
    """The engine of the command line, which entries take over where they say nothing."""

    config: SchedulerConfig
    cost: CostModel
    deployment: Deployment | None = None  # None: measured, and not known by model and chip
    learns: Callable[[], CostModel] | None = None
    jitter: bool = False
    catalogues: dict[str, tuple[Path, ...]] = field(default_factory=dict)  # the user's own: "models", "chips"


def load_fleet(path: str | Path) -> FleetFile:
    """Read a file. ConfigError names what cannot be read, and where."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the fleet {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the fleet {path} is not TOML: {error}") from None
    try:
        return msgspec.convert(values, FleetFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the fleet {path} cannot be used: {error}") from None


def fleet_parts(file: FleetFile, base: Base, seed: int) -> tuple[list[tuple[str, Blueprint]], dict[str, Any]]:
    """Members, and the other arguments of `Fleet`. Raises ConfigError for what cannot be."""
    members: list[tuple[str, Blueprint]] = []
    layers = None
    for entry in file.engines:
        if entry.count < 1:
            raise ConfigError(f"engines {entry.name}: count is {entry.count}; it must be at least 1")
        deployment = _deployment(entry, base)
        if deployment is not None:
            layers = deployment.model.layers
        blueprint = _blueprint(entry, base, deployment)
        members += [(f"{entry.name}-{number}", blueprint) for number in range(entry.count)]
    if file.layerwise and layers is None:
        raise ConfigError("layerwise needs engines whose model is known by name")
    outages = [Outage(each.at_s, each.engine, each.down_s) for each in file.outages]
    if file.failures is not None:
        drawn = file.failures
        names = [name for name, _ in members]
        outages += drawn_outages(names, mtbf_s=drawn.mtbf_s, down_s=drawn.down_s, until_s=drawn.until_s, seed=seed)
    return members, {
        "router": make_router(file.router, file.router_options.items()),
        "decode_router": make_router(file.decode_router, file.decode_router_options.items()),
        "tiers": [
            TierSpec(
                each.name, each.capacity_tokens, LinkSpec(1e9 * each.gbs, each.latency_s), each.shared, each.always
            )
            for each in file.tiers
        ],
        "outages": outages,
        "retry": Retry(file.retry.on_loss, file.retry.most, file.retry.wait_s),
        "overlap_layers": layers if file.layerwise else None,
        "cold": file.cold,
        "seed": seed,
    }


def _deployment(entry: EngineEntry, base: Base) -> Deployment | None:
    """Model and chips of an entry; None where it is the measured engine of the command line."""
    own = base.deployment
    if own is None and entry.model is None and entry.chip is None:
        return None
    if own is None and (entry.model is None or entry.chip is None):
        raise ConfigError(f"engines {entry.name}: a calibrated engine has neither model nor chip; give both or none")
    model = (
        own.model
        if entry.model is None and own is not None
        else find_model(entry.model or "", base.catalogues.get("models", ()))
    )
    chip = (
        own.chip
        if entry.chip is None and own is not None
        else find_chip(entry.chip or "", base.catalogues.get("chips", ()))
    )
    if own is not None and entry.model is None and entry.chip is None and entry.tp == entry.ep == 1:
        return own
    return Deployment(model, chip, tp=entry.tp, ep=entry.ep, weights=entry.weights, kv=entry.kv)


def _blueprint(entry: EngineEntry, base: Base, deployment: Deployment | None) -> Blueprint:
    """An engine of an entry: the command line's scheduler, with what the entry changes."""
    config = base.config
    changes: dict[str, Any] = {
        name: value
        for name in ("policy", "max_num_batched_tokens", "max_num_seqs", "num_blocks")
        if (value := getattr(entry, name)) is not None
    }
    if entry.policy is not None or entry.policy_options:
        changes["policy_options"] = tuple(entry.policy_options.items())
    other = deployment is not None and deployment is not base.deployment
    if other and deployment is not None and entry.num_blocks is None:
        deployment.require_fit(utilization=entry.utilization)
        changes["num_blocks"] = deployment.num_blocks(config.block_size, entry.utilization)
        changes["max_model_len"] = min(config.max_model_len, changes["num_blocks"] * config.block_size)
    if entry.role is not Role.WHOLE:
        changes["prefix_caching"] = True
    draft = entry.speculation
    return Blueprint(
        replace(config, **changes),
        AnalyticCost(deployment) if other and deployment is not None else base.cost,
        role=entry.role,
        learns=base.learns,
        speculation=None if draft is None else Speculation(draft.acceptance, draft_share=draft.draft_share),
        jitter=base.jitter,
        chips=1 if deployment is None else deployment.chips,
        chip="" if deployment is None else deployment.chip.name,
        price_per_chip_hour=entry.price_per_chip_hour,
        kv_bytes_per_token=0.0 if deployment is None else deployment.kv_bytes_per_token,
        network=LinkSpec(1e9 * entry.network_gbs, entry.network_latency_s),
        cold_start_s=entry.cold_start_s,
    )
