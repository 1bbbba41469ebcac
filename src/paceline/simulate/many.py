"""A fleet under a plan's load, as the same result that one engine gives: records, usage, how it ended.

    result = simulate_fleet(traffic, setup, FleetSetup(replicas=4, router="prefix_aware"), seed=0)

The fleet itself is `paceline.simulate.fleet`; here its journeys become `RequestRecord`s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from paceline.core.step import RejectReason
from paceline.cost.analytic import AnalyticCost
from paceline.cost.online import OnlineCost
from paceline.errors import ConfigError
from paceline.measure.records import Attempt, ErrorClass, RequestRecord
from paceline.route.policies.registry import make_router
from paceline.simulate.drive import Simulated
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.file import Base, FleetFile, fleet_parts
from paceline.simulate.fleet.fleet import Fleet
from paceline.simulate.fleet.journey import Journey, Outcome
from paceline.simulate.fleet.link import LinkSpec
from paceline.simulate.fleet.report import FleetRun
from paceline.simulate.ledger import record_of
from paceline.simulate.overheads import Overheads
from paceline.simulate.progress import Backlog, OnProgress, Show
from paceline.simulate.run import EngineSetup, Simulator
from paceline.simulate.traffic import Arrival, Traffic
from paceline.simulate.usage import UsageReport


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """How many engines, who picks among them, and whether prefill and decode are apart."""

    replicas: int = 1  # whole engines; 0 with pools
    router: str = "least_load"
    prefill: int = 0  # engines that compute prompts and first tokens
    decode: int = 0  # engines that compute all further tokens
    network_bytes_per_s: float = 50e9  # of each engine, for KV that is handed over
    kv_bytes_per_token: float = 0.0  # of one engine, over all its chips
    file: FleetFile | None = None  # engines that differ, tiers, outages, prices: in place of all above

    def __post_init__(self) -> None:
        if min(self.replicas, self.prefill, self.decode) < 0:
            raise ConfigError("replicas, prefill and decode engines cannot be negative")
        if (self.prefill > 0) != (self.decode > 0):
            raise ConfigError("prefill engines need decode engines, and the other way round")
        if not self.prefill and not self.replicas:
            raise ConfigError("a fleet has at least one engine")
        if not 0.0 < self.network_bytes_per_s < inf:
            raise ConfigError(f"the network moves {self.network_bytes_per_s} bytes/s; it must be above 0")
        make_router(self.router)

    @property
    def alone(self) -> bool:
        """Whether it is one engine, with nothing to choose."""
        return self.replicas == 1 and not self.prefill and self.file is None

    @property
    def pooled(self) -> bool:
        """Whether prefill and decode are apart."""
        return self.prefill > 0

    def parts(self, setup: EngineSetup, seed: int) -> tuple[list[tuple[str, Blueprint]], dict[str, Any]]:
        """Members and the other arguments of `Fleet`. ConfigError for a file that cannot be used with this engine."""
        known = (lambda: setup.knowing) if setup.oracle else OnlineCost
        learns = known if setup.asks else None
        if self.file is not None:
            deployment = setup.cost.deployment if isinstance(setup.cost, AnalyticCost) else None
            return fleet_parts(self.file, Base(setup.config, setup.cost, deployment, learns, setup.jitter), seed)
        engine = Blueprint(setup.config, setup.cost, learns=learns, jitter=setup.jitter)
        return self.members(engine), {"router": make_router(self.router), "seed": seed}

    def price_per_hour(self, setup: EngineSetup) -> float | None:
        """Of all engines, where the file gives each a price."""
        if self.file is None:
            return None
        prices = [
            None if engine.price_per_chip_hour is None else engine.price_per_chip_hour * engine.chips
            for _, engine in self.parts(setup, 0)[0]
        ]
        return None if None in prices else sum(price for price in prices if price is not None)

    def members(self, engine: Blueprint) -> list[tuple[str, Blueprint]]:
        """Names and blueprints."""
        link = LinkSpec(self.network_bytes_per_s)
        engine = replace(engine, kv_bytes_per_token=self.kv_bytes_per_token, network=link)
        if not self.pooled:
            return [(f"engine-{i}", engine) for i in range(self.replicas)]
        prefill = [(f"prefill-{i}", replace(engine, role=Role.PREFILL)) for i in range(self.prefill)]
        return prefill + [(f"decode-{i}", replace(engine, role=Role.DECODE)) for i in range(self.decode)]


def simulator_of(fleet: FleetSetup) -> Simulator | None:
    """For `run.simulate`: what serves the traffic; None where one engine does."""
    if fleet.alone:
        return None
    return lambda traffic, setup, seed, on_progress: simulate_fleet(
        traffic, setup, fleet, seed=seed, on_progress=on_progress
    )


class _Overloaded(Exception):
    """The fleet cannot take the load."""


def simulate_fleet(
    traffic: Traffic, setup: EngineSetup, fleet: FleetSetup, *, seed: int, on_progress: OnProgress | None = None
) -> Simulated:
    """Serve the traffic to its end. Ctrl-C and overload end it early, as `drive` does."""
    watched = _Watched(traffic, setup, on_progress)
    members, options = fleet.parts(setup, seed)
    overheads = setup.overheads
    before = overheads.before_s or overheads.before_token_s
    way_s = (lambda tokens: overheads.reaches_s(0.0, tokens)) if before else None
    many = Fleet(members, **options, timeout_s=setup.limits.timeout_s, way_s=way_s, on_end=watched.note)
    began = time.perf_counter()
    ended, run = "complete", None
    try:
        run = many.run(watched, keep=False)
    except _Overloaded:
        ended = "overloaded"
    except KeyboardInterrupt:
        ended = "interrupted"
    watched.cut_off(ended)
    usage = _usage(run) if run is not None else {}
    warnings = [f"overloaded: {watched.backlog.why}; stopped at {watched.now_s:.1f} s"] if ended == "overloaded" else []
    return Simulated(
        records=watched.records,
        scrapes=[],
        usage=usage,
        ended=ended,
        ended_s=watched.now_s if run is None else run.end_s,
        real_s=time.perf_counter() - began,
        steps=sum(report.steps for report in usage.values()),
        warnings=warnings + ([_told(run)] if run is not None else []),
    )


class _Watched:
    """The traffic of a fleet: a record for each request that ends, an eye on the backlog."""

    def __init__(self, traffic: Traffic, setup: EngineSetup, on_progress: OnProgress | None) -> None:
        self._traffic, self._overheads = traffic, setup.overheads
        self.total = traffic.total
        self.records: list[RequestRecord] = []
        self.backlog = Backlog(setup.limits.overload_s)
        self.now_s = 0.0
        self._open: dict[str, Arrival] = {}
        self._sent = 0
        self._failed = 0
        self._look_s = 0.0
        self._closed_s = 0.0
        self._show = Show(on_progress, traffic.total)

    @property
    def next_s(self) -> float:
        """When the next request is sent."""
        return max(self._traffic.next_s, self.now_s)

    def pop(self) -> Arrival:
        """The next request."""
        self.now_s = self.next_s
        arrival = self._traffic.pop()
        self._open[arrival.spec.request_id] = arrival
        self._sent += 1
        if self.now_s >= self._look_s:
            self._look_s = self.now_s + 1.0
            done = len(self.records)
            self.backlog.look(self.now_s, done, self._sent - done, more=self._traffic.next_s < inf)
            if self.backlog.hopeless:
                raise _Overloaded
        return arrival

    def ended(self, arrival: Arrival, at_s: float, *, ok: bool) -> None:
        """A request has ended; its client knows a little later."""
        self.now_s = max(self.now_s, at_s)
        self._traffic.ended(arrival, max(at_s, self._closed_s), ok=ok)
        self._show.maybe(self.now_s, self._sent, len(self._open), len(self.records), self._failed)

    def note(self, journey: Journey) -> None:
        """The record of a journey that has ended."""
        del self._open[journey.request_id]
        record = _record(journey, self._overheads)
        self._closed_s = record.closed_s or 0.0  # `ended` is the fleet's next word
        self._failed += not record.ok
        self.records.append(record)

    def cut_off(self, ended: str) -> None:
        """Whoever is under way when the simulation stops."""
        error = ErrorClass.TIMEOUT if ended == "overloaded" else ErrorClass.CANCELLED
        why = "the simulation stopped: overloaded" if ended == "overloaded" else ""
        self.records += [record_of(one, (), self.now_s, error=error, why=why) for one in self._open.values()]
        self._open.clear()
        self._show.last(self.now_s, self._sent, 0, len(self.records), self._failed)


def _record(journey: Journey, overheads: Overheads) -> RequestRecord:
    """What the client saw."""
    heard, closed_s = journey.read_s(overheads), journey.closed_s(overheads)
    error, why, status = None, "", 200
    if journey.outcome is Outcome.REJECTED and journey.rejected is not None:
        turned_away = journey.rejected.reason in (RejectReason.QUEUE_FULL, RejectReason.OVERLOADED)
        error, status = (ErrorClass.REJECTED, 429) if turned_away else (ErrorClass.HTTP_4XX, 400)
        why = journey.rejected.message
    elif journey.outcome is Outcome.GIVEN_UP:
        error, why = ErrorClass.TIMEOUT, "given up by its client"
    elif journey.outcome is not Outcome.DONE:
        error, why = ErrorClass.SERVER_ERROR_IN_STREAM, f"{journey.replica or 'the engine'} died"
    attempts = tuple(
        Attempt(dispatched_s=loss.sent_s, ended_s=loss.lost_s, error=ErrorClass.TRANSPORT) for loss in journey.losses
    )
    reason = journey.finish.reason.value if journey.finish is not None and error is None else None
    return record_of(
        journey.arrival,
        heard,
        closed_s,
        error=error,
        why=why,
        status=status,
        reason=reason,
        cached=journey.cached_tokens,
        attempts=attempts,
    )


def _usage(run: FleetRun) -> dict[str, UsageReport]:
    """By engine; one that died and came back has a row for each life."""
    found: dict[str, UsageReport] = {}
    for member in run.members:
        for number, life in enumerate(member.lives):
            found[member.name if len(member.lives) == 1 else f"{member.name}, life {number + 1}"] = life.usage
    return found


def _told(run: FleetRun) -> str:
    """What else there is to know of a fleet, in a sentence."""
    text = f"prefix caches held {100 * run.hit_share:.1f} % of the prompt tokens"
    if run.transfers.count:
        text += f"; {run.transfers.count:,} hand-overs of KV moved {run.transfers.bytes / 1e9:,.1f} GB"
    if run.reloaded_tokens:
        text += f"; {100 * run.reloaded_tokens / max(run.prompt_tokens, 1):.1f} % were reloaded from slower tiers"
    if run.outages:
        text += f"; {run.outages:,} outages cost {run.lost:,} tries"
    if run.cost is not None:
        text += f"; chips cost {run.cost:,.2f}"
    return text
