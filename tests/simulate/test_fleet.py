"""A fleet on one timeline: what routers may know, that time is one, that every request ends once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import SchedulerConfig
from paceline.errors import ConfigError
from paceline.route.policies.base import Ask, Load, Router
from paceline.route.policies.registry import ROUTERS, make_router
from paceline.simulate.drive import drive
from paceline.simulate.fleet.blueprint import Blueprint, Role
from paceline.simulate.fleet.fleet import Fleet
from paceline.simulate.fleet.journey import Outcome
from paceline.simulate.replica import Replica
from paceline.simulate.traffic import Arrival, ListTraffic
from tests.simulate.fleets import config, pools, request, run, whole
from tests.simulate.laws import Linear


class Watching(Router):
    """Sends everything to the first and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Load] = []

    def pick(self, ask: Ask, loads: Sequence[Load]) -> str:
        self.seen.append(loads[0])
        return loads[0].name


def test_a_fleet_of_one_is_the_engine_itself() -> None:
    arrivals = [request(i, at_s=0.03 * i, prompt=15 + 7 * (i % 5), output=1 + i % 9) for i in range(40)]
    result = run([("a", whole())], arrivals)
    alone = drive(ListTraffic(arrivals), Replica("a", config(), Linear()))
    times = {record.id: record.read_s for record in alone.records}
    assert {journey.request_id: tuple(journey.token_s) for journey in result.done} == times


def test_a_router_sees_only_what_has_come_back() -> None:
    # The step of the first two, 40 tokens, ends at 14 ms.
    router = Watching()
    arrivals = [request(0), *(request(i, at_s=at_s) for i, at_s in enumerate((0.0, 0.0139, 0.0141, 0.5), start=1))]
    run([("a", whole()), ("b", whole())], arrivals, router=router)
    before, same_time, in_flight, after, idle = router.seen
    assert (before.waiting, before.running) == (0, 0)
    assert (same_time.waiting, same_time.waiting_tokens) == (1, 20)
    assert (in_flight.waiting, in_flight.running) == (2, 0)  # computed here already, known to nobody
    assert (after.waiting, after.running, after.running_tokens) == (1, 2, 42)
    assert (idle.waiting, idle.running, idle.running_tokens) == (0, 0, 0)


def test_two_replicas_serve_side_by_side() -> None:
    arrivals = [request(i, prompt=100, output=1) for i in range(2)]
    one = run([("a", whole(config=config(max_num_batched_tokens=100)))], arrivals)
    two = run([(name, whole(config=config(max_num_batched_tokens=100))) for name in "ab"], arrivals)
    assert sorted(j.token_s[-1] for j in one.done) == pytest.approx([0.02, 0.04], rel=0.01)
    assert [j.token_s[-1] for j in two.done] == pytest.approx([0.02, 0.02], rel=0.01)
    assert {j.replica for j in two.done} == {"a", "b"}


def test_a_faster_chip_gets_more_of_the_work() -> None:
    slow, fast = Linear(token_s=4e-4), Linear(token_s=1e-4)
    arrivals = [request(i, at_s=0.01 * i, prompt=300, output=2) for i in range(100)]
    result = run([("slow", whole(cost=slow)), ("fast", whole(cost=fast))], arrivals)
    served = Counter(journey.replica for journey in result.done)
    assert served["fast"] > 2 * served["slow"]


def test_prefix_aware_routing_computes_less_than_round_robin() -> None:
    shared = [tuple(2 + group * 1000 + i for i in range(256)) for group in range(6)]
    groups = random.Random(0).choices(range(6), k=60)
    arrivals = [
        request(i, at_s=0.4 * i, output=2, tokens=(*shared[group], *(50_000 + 40 * i + k for k in range(40))))
        for i, group in enumerate(groups)
    ]
    blueprint = whole(config=config(num_blocks=48))  # room for two prefixes of 16 blocks and a request
    members = [(name, blueprint) for name in "abcd"]
    aware = run(members, arrivals, router=make_router("prefix_aware"))
    blind = run(members, arrivals, router=make_router("round_robin"))
    assert aware.cached_tokens == (60 - 6) * 256  # each prefix was computed once in the whole fleet
    assert blind.cached_tokens < 0.7 * aware.cached_tokens


def test_a_refused_request_has_ended() -> None:
    result = run([("a", whole())], [request(0, prompt=600), request(1)])
    assert result.outcomes == {Outcome.DONE: 1, Outcome.REJECTED: 1, Outcome.FAILED: 0, Outcome.GIVEN_UP: 0}
    assert result.journeys[0].rejected is not None


def test_stopped_early_says_who_was_under_way() -> None:
    arrivals = [request(i, at_s=0.1 * i, output=200) for i in range(10)]
    result = run([("a", whole(config=config(num_blocks=256)))], arrivals, until_s=0.55)
    assert (result.arrived, result.unended) == (6, 6)
    assert result.end_s == 0.55


SCENARIO = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 300), st.integers(1, 30), st.integers(0, 3)), max_size=25
)


def arrivals_of(drawn: list[tuple[float, int, int, int]]) -> list[Arrival]:
    return [
        request(i, at_s, output=output, tokens=(group + 2,) * prompt)
        for i, (at_s, prompt, output, group) in enumerate(drawn)
    ]


@settings(max_examples=30, deadline=None)
@given(drawn=SCENARIO, router=st.sampled_from(sorted(ROUTERS)), count=st.integers(1, 4), pooled=st.booleans())
def test_every_request_ends_once_and_the_same_way_again(
    drawn: list[tuple[float, int, int, int]], router: str, count: int, pooled: bool
) -> None:
    members = pools(count, 2) if pooled else [(f"r{i}", whole()) for i in range(count)]
    first = run(members, arrivals_of(drawn), router=make_router(router))
    again = run(members, arrivals_of(drawn), router=make_router(router))
    assert [journey.token_s for journey in first.journeys] == [journey.token_s for journey in again.journeys]
    assert [journey.replica for journey in first.journeys] == [journey.replica for journey in again.journeys]


def test_jitter_follows_the_seed() -> None:
    noisy = whole(cost=Linear(spread=0.3), jitter=True)
    arrivals = [request(i, at_s=0.05 * i) for i in range(20)]
    times = [run([("a", noisy)], arrivals, seed=seed).journeys[-1].token_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_what_a_run_costs() -> None:
    paid = whole(price_per_chip_hour=3.6, chips=2, chip="x")  # 0.2 cents a second for the replica
    result = run([("a", paid), ("b", paid)], [request(0, output=11), request(1, at_s=9.0, prompt=50, output=1)])
    assert result.end_s == pytest.approx(9.015, rel=1e-4)
    cost = 2 * 0.002 * result.end_s
    assert result.cost == pytest.approx(cost)
    assert result.cost_per_million() == pytest.approx(cost / 12 * 1e6)
    assert result.cost_per_million(of="all") == pytest.approx(cost / 82 * 1e6)
    assert run([("a", paid), ("b", whole())], [request(0)]).cost is None


def test_utilisation_is_of_each_member() -> None:
    result = run([("a", whole()), ("b", whole())], [request(0, output=4), request(1, at_s=1.0, output=1)])
    busy = {member.name: member.busy_s for member in result.members}
    assert busy["a"] + busy["b"] == pytest.approx(2 * 0.012 + 3 * 0.0101, rel=1e-3)
    assert all(0.0 <= member.utilisation <= 1.0 for member in result.members)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "at least one"),
        ([("a", whole()), ("a", whole())], "no name twice"),
        ([("a", whole(role=Role.PREFILL))], "needs decode engines"),
        ([*pools(1, 1), ("w", whole())], "not of both"),
    ],
)
def test_fleets_that_cannot_be(members: list[tuple[str, Blueprint]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Fleet(members)


def test_pools_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="prefix_caching"):
        pools(1, 1, config=SchedulerConfig(num_blocks=8, max_model_len=64, prefix_caching=False))


def test_a_long_quiet_time_costs_no_events() -> None:
    result = run([("a", whole()), ("b", whole())], [request(0), request(1, at_s=1e6)])
    assert result.end_s < 1e6 + 1 < math.inf
    assert sum(member.steps for member in result.members) == 8
    assert replace(result.members[0], name="x").name == "x"


def test_a_prompt_on_its_way_is_work_and_no_hit() -> None:
    long = request(0, prompt=400, output=1)
    router = make_router("prefix_aware")
    result = run([("a", whole()), ("b", whole())], [long, request(1, prompt=40, output=1)], router=router)
    assert [journey.replica for journey in result.done] == ["a", "b"]
