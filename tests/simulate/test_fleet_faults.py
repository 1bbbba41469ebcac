"""Engines die and come back; every request still ends exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.route.policies.registry import ROUTERS, make_router
from paceline.simulate.fleet.blueprint import cold_start_s
from paceline.simulate.fleet.faults import Outage, Retry, drawn_outages
from paceline.simulate.fleet.journey import Outcome
from paceline.simulate.fleet.link import LinkSpec
from tests.simulate.fleets import pools, request, run, whole
from tests.simulate.laws import Linear

LAW = Linear(0.010, 1e-4, 0.0)
TWO = [("a", whole(cost=LAW)), ("b", whole(cost=LAW))]


def test_a_request_is_tried_again_elsewhere_and_starts_over() -> None:
    result = run(TWO, [request(0, prompt=20, output=50)], outages=[Outage(0.2, "a")])
    (journey,) = result.done
    assert journey.replica == "b"
    (loss,) = journey.losses
    assert (loss.replica, loss.lost_s) == ("a", 0.2)
    assert loss.tokens == 1 + int((0.2 - 0.012) / 0.0101)
    assert journey.token_s[0] == pytest.approx(0.2 + 0.012)
    assert result.lost == 1


def test_a_stream_that_is_resumed_keeps_its_tokens() -> None:
    retry = Retry("resume", wait_s=0.05)
    result = run(TWO, [request(0, prompt=20, output=50)], outages=[Outage(0.2, "a")], retry=retry)
    (journey,) = result.done
    had = journey.losses[0].tokens
    assert journey.token_s[0] == pytest.approx(0.012)
    assert journey.token_s[had] == pytest.approx(0.25 + 0.010 + (20 + had) * 1e-4)  # prompt and what was said, again


def test_a_step_that_was_under_way_reaches_nobody() -> None:
    # The only step of the request ends at 12 ms; the engine dies at 11.
    result = run(TWO, [request(0, output=1)], outages=[Outage(0.011, "a")])
    assert result.done[0].token_s == pytest.approx([0.011 + 0.012])


def test_without_retries_the_client_gets_an_error() -> None:
    result = run(TWO, [request(0, output=50)], outages=[Outage(0.2, "a")], retry=Retry("fail"))
    assert result.outcomes[Outcome.FAILED] == 1
    result = run(
        TWO,
        [request(0, output=90)],
        outages=[Outage(0.2, "a"), Outage(0.4, "b"), Outage(0.6, "a")],
        retry=Retry(most=2),
    )
    assert result.outcomes[Outcome.FAILED] == 1
    assert len(result.journeys[0].losses) == 3


def test_who_comes_while_nobody_is_up_waits_for_the_cold_start() -> None:
    members = [("a", whole(cost=LAW, cold_start_s=5.0))]
    result = run(members, [request(0, output=2), request(1, at_s=1.0)], outages=[Outage(0.5, "a", down_s=2.0)])
    assert result.done[1].token_s[0] == pytest.approx(0.5 + 2.0 + 5.0 + 0.012)
    assert result.members[0].up_s == pytest.approx(result.end_s - 7.0)
    assert result.members[0].paid_s == pytest.approx(result.end_s - 2.0)


def test_who_comes_when_nobody_will_be_up_fails() -> None:
    members = [("a", whole(cost=LAW))]
    result = run(members, [request(0, at_s=1.0)], outages=[Outage(0.5, "a", down_s=float("inf"))])
    assert result.outcomes[Outcome.FAILED] == 1


def test_a_fleet_may_start_cold() -> None:
    result = run([("a", whole(cost=LAW, cold_start_s=3.0))], [request(0)], cold=True)
    assert result.done[0].token_s[0] == pytest.approx(3.012)
    assert cold_start_s(16e9, 2e9, process_s=10.0, warm_up_s=20.0) == 38.0


def test_the_cache_is_empty_after_a_death() -> None:
    prompt = tuple(range(2, 66))
    arrivals = [request(i, at_s=float(i), output=1, tokens=prompt) for i in range(3)]
    result = run([("a", whole(cost=LAW))], arrivals, outages=[Outage(1.5, "a", down_s=0.1)])
    assert [journey.cached_tokens for journey in result.journeys] == [0, 48, 0]


def test_kv_on_its_way_to_a_dead_engine_is_lost() -> None:
    members = pools(1, 2, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9))
    result = run(members, [request(0, prompt=32, output=3)], outages=[Outage(0.03, "d0")])
    (journey,) = result.done
    assert (journey.replica, len(journey.losses)) == ("d1", 1)
    assert journey.token_s[0] == pytest.approx(0.03 + 0.0116)  # half of its prompt was in the prefill engine's cache


def test_drawn_outages_follow_the_seed_and_the_mean() -> None:
    names = ["a", "b", "c"]
    drawn = drawn_outages(names, mtbf_s=100.0, down_s=10.0, until_s=50_000.0, seed=3)
    assert drawn == drawn_outages(names, mtbf_s=100.0, down_s=10.0, until_s=50_000.0, seed=3)
    assert len(drawn) == pytest.approx(3 * 50_000 / 110, rel=0.1)
    only_a = [outage for outage in drawn if outage.replica == "a"]
    assert only_a == drawn_outages(["a"], mtbf_s=100.0, down_s=10.0, until_s=50_000.0, seed=3)
    assert all(after.at_s >= before.at_s + 10.0 for before, after in itertools.pairwise(only_a))
    with pytest.raises(ConfigError, match="mtbf"):
        drawn_outages(names, mtbf_s=0.0, down_s=1.0, until_s=1.0, seed=0)


@pytest.mark.parametrize("bad", [{"on_loss": "shrug"}, {"most": -1}, {"wait_s": -1.0}])
def test_retries_that_cannot_be(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Retry(**bad)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=15),
    outages=st.lists(
        st.tuples(st.floats(0.0, 1.5), st.integers(0, 3), st.sampled_from([0.0, 0.1, float("inf")])), max_size=6
    ),
    pooled=st.booleans(),
    router=st.sampled_from(sorted(ROUTERS)),
    retry=st.builds(
        Retry, st.sampled_from(["fail", "retry", "resume"]), st.integers(0, 3), st.sampled_from([0.0, 0.07])
    ),
    cold=st.booleans(),
    timeout_s=st.sampled_from([0.03, 0.2, float("inf")]),
)
def test_whatever_dies_every_request_ends_once(
    arrivals: list[tuple[float, int, int]],
    outages: list[tuple[float, int, float]],
    pooled: bool,
    router: str,
    retry: Retry,
    cold: bool,
    timeout_s: float,
) -> None:
    blueprint = whole(cold_start_s=0.05, kv_bytes_per_token=1e5, network=LinkSpec(1e9, 1e-3))
    members = (
        pools(2, 2, cold_start_s=0.05, kv_bytes_per_token=1e5, network=LinkSpec(1e9, 1e-3))
        if pooled
        else [(f"r{i}", blueprint) for i in range(4)]
    )
    names = [name for name, _ in members]
    run(
        members,
        [request(i, at_s, prompt, output) for i, (at_s, prompt, output) in enumerate(arrivals)],
        outages=[Outage(at_s, names[who], down_s) for at_s, who, down_s in outages],
        router=make_router(router),
        retry=retry,
        cold=cold,
        timeout_s=timeout_s,
    )


def test_a_client_that_hangs_up_frees_its_place() -> None:
    one = [("a", whole(cost=LAW))]
    result = run(one, [request(0, output=90), request(1, at_s=0.5, output=1)], timeout_s=0.3)
    assert result.outcomes[Outcome.GIVEN_UP] == 1
    first, second = result.journeys
    assert first.ended_s == pytest.approx(0.3, abs=0.0102)  # when the step under way has ended
    assert first.tokens == pytest.approx(0.3 / 0.0101, abs=2)
    assert second.token_s == pytest.approx([0.512])


def test_clients_hang_up_while_nobody_is_there_and_on_the_wire() -> None:
    cold = run([("a", whole(cost=LAW, cold_start_s=5.0))], [request(0)], cold=True, timeout_s=1.0)
    assert cold.journeys[0].ended_s == 1.0
    members = pools(1, 1, cost=LAW, kv_bytes_per_token=1e9, network=LinkSpec(1e9))  # 32 s on the wire
    result = run(members, [request(0, prompt=32), request(1, at_s=40.0, output=1)], timeout_s=1.0)
    assert result.outcomes == {Outcome.DONE: 1, Outcome.REJECTED: 0, Outcome.FAILED: 0, Outcome.GIVEN_UP: 1}
