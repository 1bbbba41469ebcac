"""A fleet gives the records of a run: one for each request, whatever became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.core.config import SchedulerConfig
from paceline.core.pace import Pace
from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.errors import ConfigError
from paceline.measure.analysis import analyse
from paceline.measure.metrics import measure
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target
from paceline.measure.records import ErrorClass
from paceline.route.policies.base import Ask
from paceline.simulate.drive import Limits, Simulated
from paceline.simulate.fleet.journey import Journey, Outcome
from paceline.simulate.many import FleetSetup, simulator_of
from paceline.simulate.overheads import Overheads
from paceline.simulate.run import EngineSetup, simulate, simulate_only
from paceline.simulate.traffic import Arrival
from tests.simulate.laws import Linear

PROMPTS = Prompts(input=Length(kind="uniform", low=20, high=200), output=Length(kind="uniform", low=2, high=30))


def plan(rate: float = 20.0, requests: int = 60, prompts: Prompts = PROMPTS) -> BenchPlan:
    load = Load(arrivals=Arrivals.POISSON, rate=rate, requests=requests)
    return BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts)


def setup(policy: str = "decode_first", law: Any = None, **fields: Any) -> EngineSetup:
    config = SchedulerConfig(num_blocks=256, max_model_len=1024, max_num_seqs=8, policy=policy)
    return EngineSetup(config, law or Linear(), {"model": "m"}, kv_bytes_per_token=1e5, **fields)


def run(fleet: FleetSetup, engine: EngineSetup | None = None, load: BenchPlan | None = None) -> Simulated:
    return simulate_only(load or plan(), engine or setup(), None, simulator_of(fleet))[0]


def test_one_engine_is_no_fleet() -> None:
    assert simulator_of(FleetSetup()) is None
    assert simulator_of(FleetSetup(replicas=2)) is not None


@pytest.mark.parametrize("policy", ["decode_first", "slo"])
@pytest.mark.parametrize(
    "fleet",
    [FleetSetup(replicas=3), FleetSetup(replicas=2, router="round_robin"), FleetSetup(replicas=0, prefill=1, decode=2)],
)
def test_everybody_has_one_whole_record(fleet: FleetSetup, policy: str) -> None:
    result = run(fleet, setup(policy, overheads=Overheads(0.01, 0.0, 0.002)))
    assert result.ended == "complete"
    assert len({record.id for record in result.records}) == len(result.records) == 60
    for record in result.records:
        assert record.ok
        assert len(record.read_s) == record.output_tokens_wanted
        assert list(record.read_s) == sorted(record.read_s)
        assert record.read_s[0] > record.scheduled_s + 0.012
    assert len(result.usage) == 3 if fleet.replicas != 2 else 2
    assert result.steps == sum(report.steps for report in result.usage.values()) > 0


@pytest.mark.parametrize("policy", ["decode_first", "slo"])
@pytest.mark.parametrize("overheads", [Overheads(), Overheads(0.01, 2e-5, 0.003, 4e-4)])
def test_a_fleet_of_one_behind_a_router_is_that_engine(policy: str, overheads: Overheads) -> None:
    """The road through the fleet's timeline and the single engine's own loop tell the same, token by token."""
    from paceline.simulate.many import simulate_fleet

    engine = setup(policy, overheads=overheads, class_shares={"interactive": 1.0})
    alone, _ = simulate_only(plan(), engine)
    fleet = FleetSetup(replicas=1)
    many, _ = simulate_only(plan(), engine, None, lambda t, s, seed, show: simulate_fleet(t, s, fleet, seed=seed))
    ours = {record.id: (record.read_s, record.closed_s) for record in alone.records}
    theirs = {record.id: (record.read_s, record.closed_s) for record in many.records}
    assert ours.keys() == theirs.keys()
    for name, (read_s, closed_s) in ours.items():
        assert theirs[name][0] == pytest.approx(read_s)
        assert theirs[name][1] == pytest.approx(closed_s)


def test_what_a_fleet_reports_is_what_clients_read() -> None:
    """Tokens held back by a pace count when they are shown, in gaps as in records."""
    journey = Journey(all_of_one(), Ask("r", 3, (), 16, ""))
    for at_s in (1.0, 1.01, 1.02, 1.03):
        journey.got(at_s, 1)
    journey.pace = Pace(0.1, hold=2)
    journey.end(Outcome.DONE, 1.2)
    shown = (1.0, 1.03, 1.13, 1.2)
    assert journey.read_s() == pytest.approx(shown)
    assert journey.gaps_s() == pytest.approx([0.03, 0.1, 0.07])
    assert journey.tpot_s == pytest.approx(0.2 / 3)
    assert journey.e2e_s == pytest.approx(1.2)


def all_of_one() -> Arrival:
    return Arrival(0.0, RequestSpec("r", (2, 3, 4), SamplingParams(max_tokens=4)), 4)


def test_more_engines_serve_sooner() -> None:
    def mean_ttft(replicas: int) -> float:
        result = run(FleetSetup(replicas=replicas), load=plan(rate=300.0, requests=200))
        found = [measure(record).ttft_s or 0.0 for record in result.records]
        return sum(found) / len(found)

    assert mean_ttft(4) < 0.5 * mean_ttft(2)


def test_overload_is_seen() -> None:
    engine = setup(limits=Limits(overload_s=20.0))
    long = Prompts(input=Length(value=20), output=Length(value=60))
    result = run(FleetSetup(replicas=2), engine, plan(rate=60.0, requests=6000, prompts=long))
    assert result.ended == "overloaded"
    assert "overloaded" in result.warnings[0]
    assert {record.error for record in result.records} == {None, ErrorClass.TIMEOUT}


def test_ctrl_c_keeps_what_is_known() -> None:
    class Impatient(Linear):
        def predict(self, shape: Any) -> Any:
            if self.asked > 150:
                raise KeyboardInterrupt
            return super().predict(shape)

    result = run(FleetSetup(replicas=2), setup(law=Impatient()))
    assert result.ended == "interrupted"
    assert {record.error for record in result.records} == {None, ErrorClass.CANCELLED}


def test_clients_of_a_fleet_give_up() -> None:
    load = plan(rate=400.0, requests=400)
    patient, hasty = (
        msgspec.structs.replace(load, client=msgspec.structs.replace(load.client, timeout_s=timeout_s))
        for timeout_s in (600.0, 1.0)
    )
    assert all(record.ok for record in run(FleetSetup(replicas=2), load=patient).records)
    errors = {record.error for record in run(FleetSetup(replicas=2), load=hasty).records}
    assert errors == {None, ErrorClass.TIMEOUT}


def test_its_folder_is_a_run(tmp_path: Path) -> None:
    fleet = FleetSetup(replicas=0, prefill=1, decode=1)
    folder, _ = simulate(plan(), setup(), tmp_path / "run", simulator=simulator_of(fleet))
    analysis = analyse(folder)
    assert analysis.run.succeeded == 60
    assert set(folder.manifest.engine["usage"]) == {"prefill-0", "decode-0"}
    assert any("hand-overs" in warning for warning in folder.manifest.warnings)


@pytest.mark.parametrize(
    "fields", [{"replicas": 0}, {"prefill": 1}, {"replicas": -1}, {"router": "best"}, {"network_bytes_per_s": 0.0}]
)
def test_what_is_no_fleet(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FleetSetup(**fields)
