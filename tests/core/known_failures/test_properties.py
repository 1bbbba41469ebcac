"""Arbitrary traffic on arbitrary machines: slo is never worse than what it replaces, and nobody pays without bound."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.classes import BATCH, TrafficClass
from paceline.core.shape import StepShape
from tests.core.known_failures.rig import Ask, Law, Sim, ask, conversation, cpu, gpu, poisson, start, taught


@dataclass(frozen=True)
class Scenario:
    """Everything that may differ; `load` is in terms of what the machine can do, roughly."""

    seed: int
    fast: bool
    load: float
    num_blocks: int
    seats: int
    itl_s: float
    ttft_s: float

    def law(self) -> Law:
        noise, speed = random.Random(self.seed + 1), random.Random(self.seed).uniform(0.6, 1.6)
        machine = gpu if self.fast else cpu

        def law(shape: StepShape) -> float:
            return machine(shape) / speed * noise.lognormvariate(0.0, 0.03)

        return law

    @property
    def classes(self) -> tuple[TrafficClass, ...]:
        first = TrafficClass("first", 0, ttft_s=self.ttft_s, itl_s=self.itl_s, weight=2.0)
        return first, TrafficClass("second", 1, ttft_s=4 * self.ttft_s, itl_s=2 * self.itl_s), BATCH

    @property
    def asks(self) -> list[Ask]:
        rng = random.Random(self.seed)
        rate = self.load * (45.0 if self.fast else 1.2)
        span = (0.0, 6.0 if self.fast else 25.0)
        return [
            one
            for kind, share in (("first", 0.5), ("second", 0.3), ("batch", 0.2))
            for tenant in "xy"
            for one in poisson(rng, kind[0] + tenant, rate * share / 2, span, conversation, kind=kind, tenant=tenant)
        ]

    def play(self, policy: str) -> Sim:
        law = self.law()
        scheduler = start(
            policy, law, num_blocks=self.num_blocks, max_num_seqs=self.seats, classes=self.classes, cost=taught(law)
        )
        return Sim(scheduler, law).play(self.asks)


SCENARIOS = st.builds(
    Scenario,
    seed=st.integers(0, 10_000),
    fast=st.booleans(),
    load=st.floats(0.2, 2.0),
    num_blocks=st.sampled_from([130, 300, 4000]),
    seats=st.sampled_from([8, 32, 256]),
    itl_s=st.floats(0.05, 0.3),
    ttft_s=st.floats(1.0, 3.0),
)


def goodput(run: Sim) -> float:
    """Worth of the promises that were kept."""
    return sum(life.kind.weight * life.kept for life in run.lives.values() if life.kind.promises)


def late(run: Sim) -> float:
    """Worth of the tokens that came late, first ones and others alike."""
    return sum(life.kind.weight * (life.first_late + life.late_gaps) for life in run.lives.values())


def compare(scenario: Scenario, policy: str = "slo") -> None:
    """slo against decode_first, but for the luck of a few requests.

    A promise allows a share of late gaps. decode_first spends it whenever a prompt comes, and so, on a small machine,
    sometimes has a few more first tokens in time. slo leaves it unspent: where it keeps fewer promises, it must at
    least have no more tokens late.
    """
    slo, vllm = scenario.play(policy), scenario.play("decode_first")
    full = sum(life.kind.weight for life in slo.lives.values() if life.kind.promises)
    few = max(4.0, 0.05 * full)
    assert goodput(slo) >= goodput(vllm) - few or late(slo) <= late(vllm) + few
    assert goodput(slo) >= goodput(vllm) - 2.0 * few
    assert all(life.finish for life in slo.lives.values())
    assert max((life.finish.preemptions for life in slo.lives.values() if life.finish), default=0) <= 6
    assert slo.now <= 2.5 * vllm.now + 5.0, "the price of pace: at worst steps that are mostly fixed cost"


@settings(max_examples=25, deadline=None)
@given(scenario=SCENARIOS)
@example(scenario=Scenario(11, True, 1.4, 300, 32, 0.1, 1.0))
@example(scenario=Scenario(7819, False, 0.7307469129399551, 4000, 32, 0.2907779651875498, 1.0096604870060883))
def test_goodput_is_not_below_decode_first_and_preemptions_are_bounded(scenario: Scenario) -> None:
    compare(scenario)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None)
@given(scenario=SCENARIOS)
def test_goodput_is_not_below_decode_first_in_many_scenarios(scenario: Scenario) -> None:
    compare(scenario)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    overload=st.floats(1.0, 3.0),
    flood=st.sampled_from(["first", "second", "batch"]),
    tenant=st.sampled_from("xy"),
)
def test_a_little_of_every_class_and_tenant_is_served_soon_under_any_sustained_flood(
    seed: int, overload: float, flood: str, tenant: str
) -> None:
    rng = random.Random(seed)
    scenario = Scenario(seed, False, 1.0, 4000, 256, 0.1, 2.0)
    asks = poisson(rng, "flood", 2.0 * overload, (0.0, 60.0), conversation, kind=flood, tenant="x")
    asks += [
        ask(4.0 + 10.0 * n + 3.0 * place, f"{kind}{n}", 30, 8, kind=kind, tenant=tenant)
        for place, kind in enumerate(("first", "second", "batch"))
        for n in range(6)
        if kind != flood or tenant == "y"  # a flooder's own requests wait in his own line
    ]
    law = scenario.law()
    run = Sim(start("slo", law, classes=scenario.classes, cost=taught(law)), law).play(asks, until_s=90.0)
    waits = {name: life.ttft_s for name, life in run.lives.items() if not name.startswith("flood")}
    assert max(waits.values()) < 35.0, waits
