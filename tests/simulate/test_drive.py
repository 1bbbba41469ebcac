"""Traffic against an engine: nothing is lost, nothing is told twice, one seed is one run, and metrics take the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import POLICIES
from paceline.cost.online import OnlineCost
from paceline.errors import ConfigError
from paceline.measure.analysis import analyse
from paceline.measure.metrics import measure
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target
from paceline.measure.records import ErrorClass, RequestRecord
from paceline.measure.report.write import write_report
from paceline.measure.schedule import build_schedule
from paceline.simulate.drive import Limits, Simulated, drive
from paceline.simulate.overheads import Overheads
from paceline.simulate.replica import Replica
from paceline.simulate.results import write_run
from paceline.simulate.traffic import planned
from tests.simulate.laws import Linear


def plan_of(load: Load, *, prompts: Prompts | None = None, seed: int = 0, **fields: Any) -> BenchPlan:
    prompts = prompts or Prompts(
        input=Length(kind="uniform", low=5, high=300), output=Length(kind="uniform", low=1, high=40)
    )
    return BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts, seed=seed, **fields)


def poisson(rate: float = 5.0, requests: int = 60) -> Load:
    return Load(arrivals=Arrivals.POISSON, rate=rate, requests=requests)


def engine(policy: str = "decode_first", *, debug: bool = True, **fields: Any) -> Replica:
    values = {"num_blocks": 128, "max_model_len": 1024, "policy": policy, "max_num_seqs": 16, **fields}
    replica = Replica("engine", SchedulerConfig(**values), Linear(), learns=OnlineCost(), debug=debug)
    replica.warm_up()
    return replica


def simulated(plan: BenchPlan, replica: Replica | None = None, **settings: Any) -> Simulated:
    return drive(planned(plan), replica or engine(), **settings)


def by_id(result: Simulated) -> dict[str, RequestRecord]:
    found = {record.id: record for record in result.records}
    assert len(found) == len(result.records), "a request has two records"
    return found


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_everybody_whole(policy: str) -> None:
    plan = plan_of(poisson())
    result = simulated(plan, engine(policy))
    records = by_id(result)
    assert result.ended == "complete"
    for arrival in build_schedule(plan):
        record = records[f"r{arrival.index}"]
        assert record.ok
        assert record.usage is not None
        assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (arrival.inputs[0], arrival.outputs[0])
        assert len(record.read_s) == arrival.outputs[0]
        assert list(record.read_s) == sorted(record.read_s)
        assert arrival.at_s is not None
        assert record.scheduled_s == arrival.at_s < record.read_s[0]
        assert record.closed_s == record.read_s[-1]
    usage = result.usage["engine"]
    assert 0.0 < usage.utilisation <= 1.0
    assert sum(usage.bound_share.values()) == pytest.approx(1.0)


def test_one_seed_is_one_run() -> None:
    plan = plan_of(poisson(), seed=3)
    one, two = simulated(plan, engine("slo")), simulated(plan, engine("slo"))
    assert one.records == two.records
    assert one.scrapes == two.scrapes
    assert one.usage == two.usage
    other = simulated(msgspec.structs.replace(plan, seed=4), engine("slo"))
    assert other.records != one.records


@given(
    rate=st.floats(0.2, 60.0),
    requests=st.integers(1, 25),
    turns=st.integers(1, 3),
    cap=st.none() | st.integers(1, 5),
    prefix=st.sampled_from((0, 40)),
    policy=st.sampled_from(("slo", "decode_first", "prefill_first", "no_evict")),
    overheads=st.builds(Overheads, st.sampled_from((0.0, 0.02)), st.sampled_from((0.0, 1e-5)), st.floats(0.0, 0.01)),
    max_tokens=st.none() | st.integers(1, 64),
)
@settings(max_examples=60, deadline=None)
def test_traffic_is_conserved(
    rate: float,
    requests: int,
    turns: int,
    cap: int | None,
    prefix: int,
    policy: str,
    overheads: Overheads,
    max_tokens: int | None,
) -> None:
    load = Load(arrivals=Arrivals.POISSON, rate=rate, requests=requests, max_concurrency=cap)
    prompts = Prompts(
        input=Length(kind="uniform", low=1, high=120),
        output=Length(kind="uniform", low=1, high=20),
        turns=Length(value=turns),
        think=Length(value=50, low=0),
        prefix_tokens=prefix,
    )
    plan = plan_of(load, prompts=prompts)
    replica = engine(policy, num_blocks=96)
    result = drive(planned(plan, max_tokens=max_tokens), replica, overheads=overheads)
    records = by_id(result)
    assert result.ended == "complete"
    assert len(records) == requests * turns
    assert all(record.ok for record in records.values())
    assert replica.idle
    replica.scheduler.check_integrity()
    stats = replica.scheduler.stats()
    assert stats.kv_blocks_used == 0
    assert stats.generation_tokens == sum(len(record.read_s) for record in records.values())
    for record in records.values():
        sent_s = record.dispatched_s
        assert sent_s is not None
        assert record.scheduled_s <= sent_s
        assert record.written_s is not None
        least_s = overheads.before_s + overheads.after_s + replica.backend.cost.predict(shape_of_one()).seconds
        assert record.read_s[0] >= sent_s + least_s - 1e-9
        assert len(record.read_s) == record.output_tokens_wanted
    if cap is not None:
        assert most_in_flight(list(records.values())) <= cap


def shape_of_one() -> Any:
    from paceline.core.shape import StepShape

    return StepShape().plus(0, 1)


def most_in_flight(records: list[RequestRecord]) -> int:
    changes: list[tuple[float, int]] = []
    for record in records:
        assert record.dispatched_s is not None
        assert record.closed_s is not None
        changes += [(record.dispatched_s, 1), (record.closed_s, -1)]
    level = most = 0
    for _, change in sorted(changes):  # at equal times, who leaves makes room for who comes
        level += change
        most = max(most, level)
    return most


def test_later_turns_find_the_earlier_ones_in_the_cache() -> None:
    prompts = Prompts(input=Length(value=100), output=Length(value=28), turns=Length(value=3))
    result = simulated(plan_of(poisson(1.0, 5), prompts=prompts))
    for record in result.records:
        assert record.usage is not None
        before = record.turn * 128
        assert record.usage.prompt_tokens == before + 100
        expected = (before - 1) // 16 * 16 if before else 0  # the KV of the very last token was never computed
        assert record.usage.cached_tokens == expected


def test_a_closed_loop_keeps_its_slots_busy() -> None:
    load = Load(arrivals=Arrivals.CLOSED, concurrency=4, requests=40)
    result = simulated(plan_of(load))
    assert len(by_id(result)) == 40
    assert sum(record.first_wave for record in result.records) == 4
    assert most_in_flight(result.records) == 4
    timed = Load(arrivals=Arrivals.CLOSED, concurrency=3, duration_s=5.0)
    result = simulated(plan_of(timed, prompts=Prompts(input=Length(value=8), output=Length(value=4))))
    assert max(record.scheduled_s for record in result.records) < 5.0
    assert result.ended_s >= 5.0 - 0.1


def test_overheads_are_added_as_they_are() -> None:
    plan = plan_of(poisson(0.1, 5))
    bare, slow = simulated(plan), simulated(plan, overheads=Overheads(0.016, 1e-5, 0.004))
    for one, other in zip(bare.records, slow.records, strict=True):
        before = measure(one).ttft_s
        after = measure(other).ttft_s
        assert before is not None
        assert after is not None
        assert one.prompt_tokens_wanted is not None
        assert after - before == pytest.approx(0.02 + 1e-5 * one.prompt_tokens_wanted)
        assert measure(other).tpot_s == pytest.approx(measure(one).tpot_s)


def test_what_the_engine_refuses_is_a_failed_record() -> None:
    prompts = Prompts(input=Length(value=2000), output=Length(value=4))
    result = simulated(plan_of(poisson(1.0, 3), prompts=prompts))
    assert [(record.status, record.error) for record in result.records] == [(400, ErrorClass.HTTP_4XX)] * 3
    full = simulated(plan_of(poisson(500.0, 50)), engine(max_waiting=2, max_num_seqs=1))
    assert {record.status for record in full.records if not record.ok} == {429}
    assert len(by_id(full)) == 50


def test_clients_give_up() -> None:
    result = simulated(plan_of(poisson(50.0, 60)), limits=Limits(timeout_s=0.5))
    errors = [record.error for record in result.records]
    assert result.ended == "complete"
    assert errors.count(ErrorClass.TIMEOUT) > 0
    assert set(errors) <= {None, ErrorClass.TIMEOUT}
    assert len(by_id(result)) == 60


def test_a_load_without_hope_is_stopped() -> None:
    plan = plan_of(Load(arrivals=Arrivals.POISSON, rate=20.0, duration_s=300.0))
    result = simulated(plan, engine(max_num_seqs=2, debug=False), limits=Limits(overload_s=60.0))
    assert result.ended == "overloaded"
    assert result.ended_s < 70.0
    assert "overloaded" in result.warnings[0]
    assert sum(record.error is ErrorClass.TIMEOUT for record in result.records) > 500


def test_a_burst_that_drains_is_no_overload() -> None:
    plan = plan_of(Load(arrivals=Arrivals.CONSTANT, rate=1000.0, requests=400))
    result = simulated(plan, engine(max_num_seqs=2, debug=False), limits=Limits(overload_s=5.0))
    assert result.ended == "complete"


def test_ctrl_c_keeps_what_is_known(tmp_path: Path) -> None:
    class Impatient(Linear):
        def predict(self, shape: Any) -> Any:
            if self.asked > 200:
                raise KeyboardInterrupt
            return super().predict(shape)

    replica = Replica("engine", SchedulerConfig(num_blocks=128, max_model_len=1024), Impatient())
    plan = plan_of(poisson())
    result = simulated(plan, replica)
    assert result.ended == "interrupted"
    verdict = analyse(write_run(tmp_path / "run", result, plan, target={"model": "m"})).verdict
    assert "was interrupted" in verdict.headline
    ended = [record for record in result.records if record.ok]
    cut = [record for record in result.records if record.error is ErrorClass.CANCELLED]
    assert ended
    assert cut
    assert len(ended) + len(cut) == len(by_id(result))


def test_the_folder_is_a_run_like_any_other(tmp_path: Path) -> None:
    plan = plan_of(poisson(), slos=("ttft<=1s",), gates=("goodput >= 50%", "p95 ttft <= 10s"), price_per_hour=2.0)
    result = simulated(plan)
    folder = write_run(tmp_path / "run", result, plan, target={"model": "m"}, schedule=build_schedule(plan))
    assert folder.manifest.kind == "simulated"
    analysis = analyse(folder)
    assert analysis.verdict.exit_code == 0
    assert analysis.run.succeeded == 60
    assert analysis.run.tokens_estimated == 0
    assert analysis.cost is not None
    assert analysis.crosscheck.max_running is not None
    written = write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "simulated, not measured" in page
    assert "What the engines did" in page
    assert len(written.files) == 4
    with pytest.raises(ConfigError, match="already holds a run"):
        write_run(tmp_path / "run", result, plan, target={})


def test_an_overloaded_run_says_so_in_its_verdict(tmp_path: Path) -> None:
    plan = plan_of(Load(arrivals=Arrivals.POISSON, rate=20.0, duration_s=200.0))
    result = simulated(plan, engine(max_num_seqs=2, debug=False), limits=Limits(overload_s=60.0))
    analysis = analyse(write_run(tmp_path / "run", result, plan, target={"model": "m"}))
    assert "cannot take this load" in analysis.verdict.headline
    assert analysis.verdict.exit_code == 2
