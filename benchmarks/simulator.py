"""How fast the simulator is: scheduler steps a second, and how many times faster than real time.

    python benchmarks/simulator.py [--quick] [--json FILE] [--trace AZURE_CSV]

Two questions, with targets of 5,000 steps a second at 64 running and 100 times real time under the conversation trace:

    decoding    a closed loop that keeps so many requests running; every step decodes for all of them
    trace       one H100 with Llama-3-8B under the Azure conversation trace of 2023, as fast as it was recorded

Seconds are of this process's CPU time, which a busy machine disturbs less than the wall clock. For each, the scheduler
alone is timed as well (the same calls without clock, cost model, loop and records): what is left of it is ours.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from pathlib import Path

from _common import Report, arguments

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, Rejected, RequestSpec, StepEvents, StepPlan, StepResult
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target, Trace
from paceline.simulate.drive import Simulated, drive
from paceline.simulate.run import EngineSetup, traffic_of

TRACE = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "azure_conv_2023.csv"
POLICIES = ("decode_first", "slo")
TARGET_STEPS, TARGET_SPEED = 5000.0, 100.0


class Calls(Scheduler):
    """A scheduler that keeps the calls made on it, as cheaply as that can be done."""

    def __init__(self, config: SchedulerConfig, cost: CostModel | None = None) -> None:
        super().__init__(config, cost)
        self.calls: deque[tuple[str, float, object]] = deque()

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Rejected:
        self.calls.append(("submit", now, spec))
        return super().submit(spec, now)

    def plan(self, now: float) -> StepPlan | None:
        self.calls.append(("plan", now, None))
        return super().plan(now)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        self.calls.append(("commit", now, result))
        return super().commit(plan, result, now)


def engine(policy: str, max_num_seqs: int = 256) -> EngineSetup:
    """Llama-3-8B in bf16 on one H100, from its datasheet."""
    deployment = Deployment(find_model("llama-3-8b"), find_chip("h100"))
    blocks = deployment.num_blocks()
    config = SchedulerConfig(num_blocks=blocks, max_model_len=16384, policy=policy, max_num_seqs=max_num_seqs)
    return EngineSetup(config, AnalyticCost(deployment))


def decoding(running: int, steps: int) -> BenchPlan:
    """So many slots, each with one long answer."""
    load = Load(arrivals=Arrivals.CLOSED, concurrency=running, requests=running)
    prompts = Prompts(input=Length(value=64), output=Length(value=steps))
    return BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts)


def replayed(trace: Path, requests: int) -> BenchPlan:
    """The trace at its own pace."""
    load = Load(arrivals=Arrivals.TRACE)
    return BenchPlan(target=Target(url="simulated:"), load=load, trace=Trace(path=str(trace), limit=requests))


def timed(plan: BenchPlan, setup: EngineSetup) -> tuple[Simulated, float]:
    """A simulation and the CPU seconds it took."""
    traffic, _ = traffic_of(plan, setup)
    replica = setup.make(plan.seed)
    gc.collect()
    began = time.process_time()
    result = drive(traffic, replica)
    return result, time.process_time() - began


def scheduler_alone(plan: BenchPlan, setup: EngineSetup) -> float:
    """CPU seconds of the same calls on a scheduler with nothing around it."""
    traffic, _ = traffic_of(plan, setup)
    kept: list[Calls] = []

    class Kept(Calls):
        def __init__(self, config: SchedulerConfig, cost: CostModel | None = None) -> None:
            super().__init__(config, cost)
            kept.append(self)

    replica = setup.make(plan.seed, make_scheduler=Kept)
    drive(traffic, replica)
    fresh = setup.make(plan.seed).scheduler
    calls = kept[0].calls
    plans: StepPlan | None = None
    gc.collect()
    began = time.process_time()
    while calls:
        name, now, what = calls.popleft()
        if name == "plan":
            plans = fresh.plan(now)
        elif name == "commit":
            assert plans is not None
            assert isinstance(what, StepResult)
            fresh.commit(plans, what, now)
        else:
            assert isinstance(what, RequestSpec)
            fresh.submit(what, now)
    return time.process_time() - began


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, default=TRACE, help="Azure LLM inference trace 2023, conversation")


def main() -> None:
    args = arguments(__doc__, add_trace)
    repeats = 2 if args.quick else 5
    report = Report("simulator", args)
    for policy in POLICIES:
        for running in (16, 64, 256):
            plan = decoding(running, 200 if args.quick else 1000)
            measure(report, f"decoding, {running} running, {policy}", plan, engine(policy, running), repeats)
    if not args.trace.is_file():
        report.note("trace", f"left out: {args.trace} is not here")
    else:
        for policy in POLICIES:
            plan = replayed(args.trace, 500 if args.quick else 4000)
            measure(report, f"conversation trace, {policy}", plan, engine(policy), repeats)
    report.finish()


def measure(report: Report, label: str, plan: BenchPlan, setup: EngineSetup, repeats: int) -> None:
    """Rows of one case: steps a second, speed, and the scheduler's part of the time."""
    runs = [timed(plan, setup) for _ in range(repeats)]
    alone = min(scheduler_alone(plan, setup) for _ in range(repeats))
    result = runs[0][0]
    report.add(f"{label}: steps", [result.steps / seconds for _, seconds in runs], "1/s")
    report.add(f"{label}: speed", [result.ended_s / seconds for _, seconds in runs], "x real time")
    report.note(f"{label}: share of the scheduler itself", round(alone / min(seconds for _, seconds in runs), 2))


if __name__ == "__main__":
    main()
