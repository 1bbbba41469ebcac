"""A machine that its server shares: what tokens sent and requests coming take from a step is found and simulated."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel
from paceline.core.shape import StepShape
from paceline.cost.beside import Beside, Toll
from paceline.cost.fit import fit
from paceline.cost.fitted import FittedCost
from paceline.cost.recorded import read_call_times
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target
from paceline.simulate.drive import drive
from paceline.simulate.replica import Replica
from paceline.simulate.run import EngineSetup, simulate_only
from paceline.simulate.traffic import planned
from tests.simulate.laws import Linear
from tests.simulate.test_replica import config, drain, spec

TOLL = Toll(sent_s=0.8e-3, request_s=4e-3, prompt_token_s=3e-6)


class SharedMachine(Linear):
    """A step takes longer for each token that is sent meanwhile, and for each request that comes."""

    def __init__(self) -> None:
        super().__init__(0.012, 2.5e-4, 2e-7)

    def seconds(self, shape: StepShape) -> float:
        return self.predict(shape).seconds

    def beside_s(self, beside: Beside) -> float:
        return TOLL.seconds(beside)


def test_a_step_waits_for_what_the_last_one_brought_and_for_who_comes() -> None:
    replica = Replica("a", config(), SharedMachine(), debug=True)
    replica.deliver(spec("r", prompt=10, most=3), 1.0)
    replica.turn(1.0)
    alone = [0.012 + 2.5e-4 * tokens + 2e-7 * context for tokens, context in ((10, 10), (1, 11), (12, 32))]
    first_s = replica.next_s
    assert first_s == pytest.approx(1.0 + alone[0]), "nothing was sent before it"
    replica.turn(first_s)
    second_s = replica.next_s
    assert second_s - first_s == pytest.approx(alone[1] + TOLL.sent_s)
    replica.deliver(spec("s", prompt=11, most=1), first_s + 0.001)
    came_s = TOLL.request_s + 11 * TOLL.prompt_token_s
    assert replica.next_s == pytest.approx(second_s + came_s), "who comes puts off the end of the step under way"
    second_s = replica.next_s
    replica.turn(second_s)
    assert replica.next_s - second_s == pytest.approx(alone[2] + TOLL.sent_s, abs=2e-5)
    ended_s = drain(replica)[-1].at_s
    replica.deliver(spec("t", prompt=10, most=1), ended_s + 5.0)
    replica.turn(ended_s + 5.0)
    assert replica.next_s - (ended_s + 5.0) == pytest.approx(alone[0]), "all was sent in the pause"


def traffic(rate: float, prompt: float, output: float, seed: int, requests: int) -> BenchPlan:
    lengths = [Length(kind="lognormal", value=value, sigma=0.5, low=4, high=900) for value in (prompt, output)]
    load = Load(arrivals=Arrivals.POISSON, rate=rate, requests=requests)
    prompts = Prompts(input=lengths[0], output=lengths[1])
    return BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts, seed=seed)


def gaps_ms(cost: CostModel, plan: BenchPlan, engine: SchedulerConfig) -> float:
    """Median time between tokens."""
    result = drive(planned(plan), Replica("engine", engine, cost))
    gaps = [
        after - before
        for record in result.records
        for before, after in zip(record.read_s[:-1], record.read_s[1:], strict=True)
    ]
    return 1e3 * statistics.median(gaps)


def test_the_toll_is_found_in_a_call_log_and_carries_to_unseen_traffic(tmp_path: Path) -> None:
    engine = SchedulerConfig(num_blocks=4000, max_model_len=2048, max_num_seqs=64)
    log = tmp_path / "calls.jsonl"
    setup = EngineSetup(engine, SharedMachine(), call_log=str(log))
    # Long prompts and short answers: few tokens are sent, as in most of a calibration.
    simulate_only(traffic(8.0, 120.0, 16.0, seed=1, requests=400), setup)
    cost = fit(read_call_times(log).steps)
    toll = cost.toll
    assert toll.sent_s == pytest.approx(TOLL.sent_s, rel=0.15)
    assert toll.request_s + 150 * toll.prompt_token_s == pytest.approx(4.45e-3, rel=0.15)
    low, high = toll.sent_range_s
    assert low <= toll.sent_s <= high < 2.0 * TOLL.sent_s

    plan = traffic(6.0, 40.0, 90.0, seed=2, requests=250)
    real = gaps_ms(SharedMachine(), plan, engine)
    assert gaps_ms(cost, plan, engine) == pytest.approx(real, rel=0.05)
    without = FittedCost(cost.terms, cost.bands, cost.ranges)
    assert gaps_ms(without, plan, engine) < 0.8 * real, "a third of a step is the server's"
    assert math.isclose(
        cost.predict(StepShape(8, 8, 800)).seconds, cost.seconds(StepShape(8, 8, 800)) + 8 * toll.sent_s
    )
