"""Each router by what it is for, and what holds for all of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.route.policies.base import Ask, Load, Router
from paceline.route.policies.registry import ALIASES, ROUTERS, make_router


def ask(number: int, tokens: int = 100, blocks: tuple[int, ...] = (), session: str = "") -> Ask:
    return Ask(f"q{number}", tokens, blocks, block_tokens=16, session=session)


def idle(count: int) -> list[Load]:
    return [Load(f"r{i}") for i in range(count)]


def place(router: Router, one: Ask, loads: list[Load]) -> str:
    """Pick and send, as whoever routes does."""
    name = router.pick(one, loads)
    router.sent(one, next(load for load in loads if load.name == name))
    return name


def drive(router: Router, asks: list[Ask], loads: list[Load]) -> list[str]:
    return [place(router, one, loads) for one in asks]


ASKS = st.lists(
    st.builds(
        Ask,
        st.uuids().map(str),
        st.integers(1, 5000),
        st.lists(st.integers(0, 5), max_size=6).map(tuple),
        st.just(16),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=30,
)
LOADS = st.lists(
    st.builds(
        Load,
        st.integers(0, 9).map(lambda i: f"r{i}"),
        st.integers(0, 9),
        st.integers(0, 9999),
        st.integers(0, 9),
        st.integers(0, 9999),
        st.sampled_from([0, 64, 4096]),
        st.sampled_from([0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda load: load.name,
)


@pytest.mark.parametrize("name", ROUTERS)
@given(asks=ASKS, loads=LOADS)
def test_every_router_picks_one_that_is_there_and_always_the_same(
    name: str, asks: list[Ask], loads: list[Load]
) -> None:
    picks = drive(make_router(name), asks, loads)
    assert set(picks) <= {load.name for load in loads}
    assert picks == drive(make_router(name), asks, loads)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_replica_that_left_is_forgotten_and_may_come_again(name: str) -> None:
    router = make_router(name)
    drive(router, [ask(i, blocks=(1, 2)) for i in range(5)], idle(3))
    router.left("r1")
    assert router.hit_tokens(ask(9, blocks=(1, 2)), "r1") == 0
    assert "r1" not in drive(router, [ask(10 + i) for i in range(20)], [Load("r0"), Load("r2")])
    assert set(drive(router, [ask(40 + i) for i in range(60)], idle(3))) <= {"r0", "r1", "r2"}


def test_round_robin_is_even_and_a_newcomer_starts_level() -> None:
    router = make_router("round_robin")
    assert drive(router, [ask(i) for i in range(6)], idle(3)) == ["r0", "r1", "r2"] * 2
    picks = drive(router, [ask(6 + i) for i in range(8)], idle(4))
    assert Counter(picks) == {"r0": 2, "r1": 2, "r2": 2, "r3": 2}


def test_random_is_roughly_even_and_follows_its_seed() -> None:
    asks = [ask(i) for i in range(3000)]
    picks = drive(make_router("random", [("seed", 1)]), asks, idle(3))
    assert all(900 < count < 1100 for count in Counter(picks).values())
    assert picks != drive(make_router("random", [("seed", 2)]), asks, idle(3))


def test_least_load_counts_tokens_not_requests() -> None:
    long, short = Load("long", waiting=1, waiting_tokens=30_000), Load("short", waiting=5, waiting_tokens=500)
    assert make_router("least_load").pick(ask(0), [long, short]) == "short"
    assert make_router("least_load", [("by", "requests")]).pick(ask(0), [long, short]) == "long"


def test_least_load_gives_a_chip_twice_as_fast_twice_the_work() -> None:
    router = make_router("least_load")
    fast, slow = Load("fast", waiting_tokens=1900, speed=2.0), Load("slow", waiting_tokens=1000)
    assert router.pick(ask(0), [slow, fast]) == "fast"


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    loads = [Load("a", waiting_tokens=10), Load("b", waiting_tokens=20), Load("c", waiting_tokens=30)]
    counts = Counter(drive(make_router("power_of_two"), [ask(i) for i in range(600)], loads))
    assert "c" not in counts
    assert counts["a"] > counts["b"] > 100  # a wins two of the three pairs


def test_prefix_aware_goes_where_the_prefix_is() -> None:
    router = make_router("prefix_aware")
    home = place(router, ask(0, 64, (1, 2, 3, 4)), idle(3))
    other = place(router, ask(1, 64, (7, 8)), idle(3))
    assert other != home  # an emptier cache, at equal cost
    assert place(router, ask(2, 80, (1, 2, 3, 9)), idle(3)) == home
    assert router.hit_tokens(ask(3, 80, (1, 2, 3, 9)), home) == 64


def test_prefix_aware_leaves_a_home_whose_queue_is_longer_than_the_hit() -> None:
    router = make_router("prefix_aware")
    home = place(router, ask(0, 64, (1, 2, 3, 4)), idle(2))
    away = "r1" if home == "r0" else "r0"
    for queue, expected in ((40, home), (90, away)):  # the hit is worth 64 tokens less the one always computed
        loads = [Load(name, waiting_tokens=queue if name == home else 0) for name in ("r0", "r1")]
        fresh = make_router("prefix_aware")
        assert place(fresh, ask(0, 64, (1, 2, 3, 4)), idle(2)) == home
        assert place(fresh, ask(1, 64, (1, 2, 3, 4)), loads) == expected
    trusting = make_router("prefix_aware", [("balance", 0.0)])
    place(trusting, ask(0, 64, (1, 2, 3, 4)), idle(2))
    assert place(trusting, ask(1, 64, (1, 2, 3, 4)), loads) == home


def test_prefix_aware_forgets_what_the_cache_cannot_hold() -> None:
    router = make_router("prefix_aware")
    loads = [Load("r0", cache_tokens=64)]
    place(router, ask(0, 64, (1, 2, 3, 4)), loads)
    place(router, ask(1, 32, (8, 9)), loads)
    assert router.hit_tokens(ask(2, 64, (1, 2, 3, 4)), "r0") == 32  # the deepest blocks went first


def test_sticky_keeps_a_session_and_moves_only_those_of_a_replica_that_left() -> None:
    router = make_router("sticky", [("bound", 100.0)])
    loads = [Load(f"r{i}", running=50) for i in range(5)]  # busy enough that the bound does not matter
    before = {s: router.pick(ask(s, session=f"s{s}"), loads) for s in range(200)}
    assert before == {s: router.pick(ask(1000 + s, session=f"s{s}"), loads) for s in range(200)}
    assert len(set(before.values())) == 5
    router.left("r2")
    rest = [load for load in loads if load.name != "r2"]
    after = {s: router.pick(ask(2000 + s, session=f"s{s}"), rest) for s in range(200)}
    assert {s for s in before if before[s] != after[s]} == {s for s in before if before[s] == "r2"}


def test_sticky_does_not_overload_the_home_of_a_popular_session() -> None:
    router = make_router("sticky")
    loads = {f"r{i}": Load(f"r{i}") for i in range(4)}
    for number in range(100):
        name = router.pick(ask(number, session="everyone"), list(loads.values()))
        loads[name] = Load(name, running=loads[name].running + 1)
    assert max(load.running for load in loads.values()) <= 1.25 * 101 / 4


def test_requests_with_one_system_prompt_have_one_home_without_a_session() -> None:
    router = make_router("sticky", [("bound", 100.0)])
    loads = [Load(f"r{i}", running=50) for i in range(5)]
    assert len({router.pick(ask(i, blocks=(77, 100 + i)), loads) for i in range(30)}) == 1


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("magic", [], "router is 'magic'; it must be one of"),
        ("random", [("bound", 1.0)], "no option 'bound'; it has seed"),
        ("sticky", [("bound", 0.5)], "bound is 0.5; it must be at least 1"),
        ("least_load", [("by", "vibes")], "by is 'vibes'; it must be one of tokens, requests"),
        ("random", [("seed", "x")], "seed is 'x'; it must be of type int"),
    ],
)
def test_bad_names_and_knobs_are_one_line(name: str, options: list[tuple[str, object]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_router(name, options)


def test_aliases_lead_somewhere() -> None:
    assert set(ALIASES.values()) <= set(ROUTERS)
    assert type(make_router("kv")) is type(make_router("prefix_aware"))
