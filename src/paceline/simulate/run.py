"""A plan against a simulated engine, into a run folder; and the highest rate that such an engine can take.

setup = EngineSetup(config, cost, target={"model": "llama-3-8b", "chip": "h100"})
folder = simulate(plan, setup, "results/one")
found = find_rate(plan, setup, "results/search", SearchSettings())
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.calllog import RecordedScheduler
from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import ALIASES
from paceline.core.protocols import CostModel
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape
from paceline.cost.online import OnlineCost
from paceline.errors import ConfigError
from paceline.measure import capacity
from paceline.measure.analysis import analyse
from paceline.measure.capacity import Answer, Capacity, SearchSettings, find_capacity, judge_trial
from paceline.measure.folder import RunFolder, refuse_taken, write_atomically
from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.schedule import Arrival, build_schedule
from paceline.measure.sweep import at_load
from paceline.simulate.drive import Limits, Simulated, drive
from paceline.simulate.overheads import Overheads
from paceline.simulate.progress import OnProgress
from paceline.simulate.recorded import is_call_log, recorded
from paceline.simulate.replica import Replica
from paceline.simulate.results import write_run
from paceline.simulate.traffic import PlannedTraffic, Traffic

MakeScheduler = Callable[[SchedulerConfig, CostModel | None], Scheduler]
Simulator = Callable[[Traffic, "EngineSetup", int, OnProgress | None], Simulated]
ASKS = frozenset(("slo",))  # policies that ask the scheduler's cost model


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine to simulate: its scheduler, its hardware's law, and what lies around it."""

    config: SchedulerConfig
    cost: CostModel
    target: Mapping[str, Any] = field(default_factory=dict)  # what it is, for the report
    overheads: Overheads = field(default_factory=Overheads)
    limits: Limits = field(default_factory=Limits)
    jitter: bool = False  # draw step times from the range of their estimate
    oracle: bool = False  # the scheduler knows `cost` itself; else it learns from the steps, as the real engine does
    max_tokens: int | None = None  # what clients ask for, where that is more than they get
    class_shares: Mapping[str, float] = field(default_factory=dict)
    default_class: str = "standard"
    call_log: str | None = None  # write every scheduler call here
    kv_bytes_per_token: float = 0.0  # over all chips of the engine, for KV that is handed to another
    max_context: int = 0  # tokens that the model was made for; 0: not known

    @property
    def asks(self) -> bool:
        """Whether its policy asks the scheduler's cost model."""
        return ALIASES.get(self.config.policy, self.config.policy) in ASKS

    @property
    def knowing(self) -> CostModel:
        """A scheduler's cost model that knows the hardware's law."""
        return _Oracle(self.cost)

    def make(self, seed: int, make_scheduler: MakeScheduler = Scheduler) -> Replica:
        """A fresh engine, warmed up."""
        learns = (self.knowing if self.oracle else OnlineCost()) if self.asks else None
        replica = Replica(
            "engine",
            self.config,
            self.cost,
            learns=learns,
            jitter=random.Random(f"{seed}:jitter") if self.jitter else None,  # noqa: S311  reproducible
            make_scheduler=make_scheduler,
        )
        if not self.oracle:
            replica.warm_up()
        return replica


class _Oracle:
    """A cost model that has nothing to learn."""

    ready = True

    def __init__(self, law: CostModel) -> None:
        self.predict = law.predict

    def observe(self, shape: StepShape, seconds: float) -> None:
        """It knew."""

    def errors(self) -> tuple[float, float]:
        """None."""
        return 0.0, 0.0


def traffic_of(plan: BenchPlan, setup: EngineSetup) -> tuple[Traffic, list[Arrival]]:
    """The requests of a plan, and the schedule behind them (none of a call log). Raises ConfigError."""
    trace = plan.trace
    if trace is not None and is_call_log(trace.path):
        if plan.load.arrivals is not Arrivals.TRACE:
            raise ConfigError(f"{trace.path} is a call log, which has its own times: give no --rate or --concurrency")
        return recorded(trace.path, speed=trace.speed, skip=trace.skip, limit=trace.limit), []
    schedule = build_schedule(plan, [kind.name for kind in setup.config.classes])
    traffic = PlannedTraffic(
        schedule,
        plan.load,
        seed=plan.seed,
        max_tokens=setup.max_tokens,
        class_shares=setup.class_shares,
        default_class=setup.default_class,
    )
    return traffic, schedule


def simulate(
    plan: BenchPlan,
    setup: EngineSetup,
    out: str | Path,
    on_progress: OnProgress | None = None,
    *,
    simulator: Simulator | None = None,
    labels: Mapping[str, str] | None = None,
    parent: str | None = None,
) -> tuple[RunFolder, Simulated]:
    """Simulate a plan and write its run folder. Raises ConfigError for what cannot be simulated or written.

    `simulator` serves the traffic with something else than one engine: a fleet (`many.py`).
    """
    refuse_taken(Path(out))
    result, schedule = simulate_only(plan, setup, on_progress, simulator)
    folder = write_run(
        out, result, plan, target=setup.target, engine=_insides(setup), schedule=schedule, labels=labels, parent=parent
    )
    return folder, result


def simulate_only(
    plan: BenchPlan,
    setup: EngineSetup,
    on_progress: OnProgress | None = None,
    simulator: Simulator | None = None,
) -> tuple[Simulated, list[Arrival]]:
    """Simulate a plan and write nothing."""
    traffic, schedule = traffic_of(plan, setup)
    limits = replace(setup.limits, timeout_s=plan.client.timeout_s)
    if simulator is not None:
        return simulator(traffic, replace(setup, limits=limits), plan.seed, on_progress), schedule
    with _scheduler_maker(setup.call_log) as make_scheduler:
        replica = setup.make(plan.seed, make_scheduler)
        return drive(traffic, replica, overheads=setup.overheads, limits=limits, on_progress=on_progress), schedule


@contextlib.contextmanager
def _scheduler_maker(path: str | None) -> Iterator[MakeScheduler]:
    """A scheduler, or one that writes its calls down."""
    if path is None:
        yield Scheduler
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  closed below; only opening it may be a ConfigError
    except OSError as error:
        raise ConfigError(f"call_log {path} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield lambda config, cost: RecordedScheduler(config, file, cost)
    except OSError as error:  # the disk is full: nothing else in a simulation touches one
        raise ConfigError(f"call_log {path} cannot be written: {error.strerror}") from error


def find_rate(
    plan: BenchPlan,
    setup: EngineSetup,
    out: str | Path,
    settings: SearchSettings,
    on_progress: OnProgress | None = None,
    on_trial: Callable[[float, int, Answer, str], None] | None = None,
    simulator: Simulator | None = None,
) -> Capacity:
    """The highest rate at which the plan's gates hold: a run folder a trial, and capacity.json beside them.

    A trial that ends in overload fails, whatever its gates say. Raises ConfigError for a plan without gates.
    """
    if not plan.gates:
        raise ConfigError("capacity needs a promise to keep: give at least one --gate or --slo")
    folder = Path(out)
    if (folder / capacity.INDEX).exists():
        raise ConfigError(f"{folder} already holds a capacity search; choose another folder")

    def trial(rate: float, attempt: int) -> tuple[Answer, str, str]:
        name = f"rate-{rate:g}-{attempt}"
        each = msgspec.structs.replace(at_load(plan, "rate", rate, ""), seed=plan.seed + attempt)
        labels = {"capacity": f"{rate:g}", "attempt": str(attempt)}
        try:
            run, result = simulate(
                each, setup, folder / name, on_progress, simulator=simulator, labels=labels, parent=folder.name
            )
            if result.ended == "interrupted":
                return Answer.STOPPED, "stopped", name
            if result.ended == "overloaded":
                answer, why = Answer.FAILS, result.warnings[0]
            else:
                answer, why = judge_trial(analyse(run))
        except KeyboardInterrupt:  # while a schedule is made, or a run is written or judged
            return Answer.STOPPED, "stopped", name
        if on_trial is not None:
            on_trial(rate, attempt, answer, why)
        return answer, why, name

    found = find_capacity(trial, settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / capacity.INDEX, msgspec.json.format(msgspec.json.encode(found), indent=2))
    return found


def _insides(setup: EngineSetup) -> dict[str, Any]:
    """What a reader of the folder may want to know of the engine."""
    return {
        "scheduler": msgspec.to_builtins(setup.config),
        "overheads": msgspec.to_builtins(setup.overheads),
        "cost": type(setup.cost).__name__,
        "jitter": setup.jitter,
        "oracle": setup.oracle,
    }
