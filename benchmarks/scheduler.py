"""What one decision costs: `Scheduler.plan` + `commit`, in microseconds a step, from 16 to 1,024 running requests.

    python benchmarks/scheduler.py [--quick] [--json FILE]

Every request decodes: each step gives each one a token, every sixteenth step (staggered over the requests) takes a new
KV block for it and names a full one. Prefills are measured apart: one arrival a step of 512 new tokens. The backend is
a constant result, so nothing but scheduling is timed. Targets at 256 running: at most 500 us a step (stretch 250).

The slo policy is measured with its cost model and a long queue: 256 running and 1,000 waiting of three classes and
eight tenants, all promised something different, on a machine whose steps take what its law says. Target: at most 1 ms a
step (stretch 500 us), learning included.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from _common import Report, arguments

from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.shape import StepShape, shape_of
from paceline.core.step import RequestSpec, StepPlan, StepResult
from paceline.cost.online import OnlineCost

STEPS = 400


@dataclass
class Case:
    """One size and what its steps took, in seconds."""

    running: int
    seconds: list[float]


def constant_result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, tuple((5,) if samples else () for samples in plan.samples))


def measure(running: int, steps: int, *, arrivals: bool) -> Case:
    """Steps of `running` decoding requests; with `arrivals`, one more of 512 tokens comes and goes in each."""
    rng = random.Random(running)
    config = SchedulerConfig(
        num_blocks=running * 128 + 4096, max_model_len=4096, max_num_batched_tokens=8192, max_num_seqs=running + 8
    )
    scheduler = Scheduler(config)
    for number in range(running):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(64, 96)))
        scheduler.submit(RequestSpec(f"r{number}", prompt, SamplingParams(max_tokens=2048)), 0.0)
    while scheduler.stats().num_waiting:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, constant_result(plan), 0.0)
    seconds = []
    for step in range(steps):
        if arrivals:
            prompt = tuple(rng.randrange(1000) for _ in range(512))
            scheduler.submit(RequestSpec(f"new{step}", prompt, SamplingParams(max_tokens=1)), 0.0)
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        middle = time.perf_counter()
        assert plan is not None
        result = constant_result(plan)
        resumed = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        seconds.append(time.perf_counter() - resumed + middle - start)
    return Case(running, seconds)


def law(shape: StepShape) -> float:
    """A machine: 12 ms a step, 60 us a token, and attention."""
    return 0.012 + 6e-5 * shape.tokens + 2e-8 * shape.context + 6e-9 * shape.pairs


def measure_slo(running: int, waiting: int, steps: int) -> Case:
    """Steps of the slo policy with that many running, and a queue that is kept that long. Submitting is not timed."""
    rng = random.Random(running)
    config = SchedulerConfig(
        num_blocks=running * 128 + 4096,
        max_model_len=4096,
        max_num_seqs=running,
        policy="slo",
        max_num_batched_tokens=8192,
    )
    scheduler, now, number = Scheduler(config, OnlineCost()), 0.0, 0
    seconds: list[float] = []
    while len(seconds) < steps:
        while scheduler.stats().num_waiting + scheduler.stats().num_running < running + waiting:
            prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(64, 1024)))
            kind = rng.choice(("interactive", "standard", "standard", "batch"))
            sampling = SamplingParams(max_tokens=rng.randrange(50, 400))
            scheduler.submit(
                RequestSpec(f"r{number}", prompt, sampling, traffic_class=kind, tenant=f"t{number % 8}"), now
            )
            number += 1
        start = time.perf_counter()
        plan = scheduler.plan(now)
        middle = time.perf_counter()
        assert plan is not None
        result = constant_result(plan)
        now += law(shape_of(plan))
        resumed = time.perf_counter()
        scheduler.commit(plan, result, now)
        took = time.perf_counter() - resumed + middle - start
        if scheduler.stats().num_running >= running - 8:  # the queue has filled the seats
            seconds.append(took)
    return Case(running, seconds)


def main() -> None:
    args = arguments(__doc__)
    steps = STEPS // 8 if args.quick else STEPS
    report = Report("scheduler", args)
    gc.collect()
    gc.freeze()
    for arrivals in (False, True):
        for running in (16, 64, 256, 1024):
            case = measure(running, steps, arrivals=arrivals)
            name = f"{running} running" + (", one prefill of 512 each step" if arrivals else "")
            report.add(name, [1e6 * value for value in case.seconds], "us/step")
            if not arrivals:
                report.add(f"{running} running, per request", [1e6 * v / running for v in case.seconds], "us")
    case = measure_slo(256, 1000, steps)
    report.add("slo: 256 running, 1,000 waiting", [1e6 * value for value in case.seconds], "us/step")
    report.finish()


if __name__ == "__main__":
    main()
