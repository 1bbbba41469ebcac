"""A call log on a disk that is full ends the simulation with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.config import SchedulerConfig
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.errors import ConfigError
from paceline.measure.plan import Arrivals, BenchPlan, Load, Target
from paceline.simulate.run import EngineSetup, simulate_only


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("requests", [1, 40])  # less than a buffer, so that closing fails, and more
def test_a_full_disk_is_named(requests: int) -> None:
    cost = AnalyticCost(Deployment(find_model("llama-3-8b"), find_chip("h100")))
    setup = EngineSetup(SchedulerConfig(num_blocks=4096, max_model_len=4096), cost, call_log="/dev/full")
    load = Load(arrivals=Arrivals.POISSON, rate=50.0, requests=requests)
    with pytest.raises(ConfigError, match="call_log /dev/full cannot be written: No space left"):
        simulate_only(BenchPlan(target=Target(url="simulated:"), load=load), setup)
