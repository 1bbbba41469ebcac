"""KV outside the GPU: reloaded where that is faster than computing it."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.simulate.fleet.link import LinkSpec
from paceline.simulate.fleet.tiers import TierSpec
from tests.simulate.fleets import config, request, run, whole
from tests.simulate.laws import Linear

LAW = Linear(0.010, 1e-4, 0.0)
LONG = tuple(range(2, 2 + 272))  # one block of 256 tokens for the tier, 17 for the engine
SMALL = config(num_blocks=17)  # holds one such prompt and no more
OTHER = tuple(range(5000, 5272))


def host(bytes_per_s: float = 1e12, capacity: int = 100_000, **fields: object) -> TierSpec:
    return TierSpec("host", capacity, LinkSpec(bytes_per_s, 0.001), **fields)  # type: ignore[arg-type]


def again(*tiers: TierSpec, members: int = 1) -> tuple[float, int, int]:
    """A prompt, another one that pushes it out of the GPU, and the first again: TTFT, cached and reloaded tokens."""
    blueprint = whole(cost=LAW, config=SMALL, kv_bytes_per_token=1e6)
    arrivals = [request(i, at_s=float(i), output=1, tokens=tokens) for i, tokens in enumerate((LONG, OTHER, LONG))]
    result = run([(f"r{i}", blueprint) for i in range(members)], arrivals, tiers=tiers)
    last = result.journeys[-1]
    assert last.ttft_s is not None
    return last.ttft_s, last.cached_tokens, last.reloaded_tokens


def test_without_a_tier_it_is_computed_again() -> None:
    assert again() == pytest.approx((0.010 + 272e-4, 0, 0))


def test_a_reload_that_is_faster_than_computing() -> None:
    # 256 tokens of 1 MB at 1 TB/s, 0.26 ms, and 1 ms of latency; then the rest of 16 tokens is computed.
    assert again(host()) == pytest.approx((0.001 + 0.000256 + 0.010 + 16e-4, 256, 256))


def test_a_reload_that_is_slower_is_left_alone_unless_told_otherwise() -> None:
    slow = 256e6 / 0.05  # 50 ms, against 35.6 ms of prefill
    assert again(host(slow)) == pytest.approx((0.010 + 272e-4, 0, 0))
    assert again(host(slow, always=True)) == pytest.approx((0.051 + 0.010 + 16e-4, 256, 256))


def test_a_tier_that_is_too_small_forgets() -> None:
    assert again(host(capacity=256))[2] == 0
    assert again(host(capacity=512))[2] == 256


def test_the_faster_tier_is_asked_first_and_the_slower_for_the_rest() -> None:
    disk = TierSpec("disk", 100_000, LinkSpec(1e11, 0.002))
    assert again(host(capacity=256), disk) == pytest.approx((0.002 + 0.00256 + 0.010 + 16e-4, 256, 256))
    assert again(host(), disk)[0] == pytest.approx(0.001256 + 0.010 + 16e-4)


def test_a_shared_tier_serves_every_replica() -> None:
    arrivals = [request(i, at_s=0.001 * i, output=1, tokens=LONG) for i in range(2)]
    later = [*arrivals, request(2, at_s=1.0, output=1, tokens=LONG), request(3, at_s=1.001, output=1, tokens=LONG)]
    blueprint = whole(cost=LAW, config=SMALL, kv_bytes_per_token=1e6)
    members = [("a", blueprint), ("b", blueprint)]
    own = run(members, [arrivals[0], later[2], later[3]], tiers=[host()])
    shared = run(members, [arrivals[0], later[2], later[3]], tiers=[host(shared=True)])
    assert {journey.replica for journey in own.done} == {journey.replica for journey in shared.done} == {"a", "b"}
    assert sum(journey.reloaded_tokens for journey in own.done) == 0
    assert sum(journey.reloaded_tokens for journey in shared.done) == 256


def test_what_the_gpu_holds_is_not_reloaded() -> None:
    arrivals = [request(i, at_s=float(i), output=1, tokens=LONG) for i in range(2)]
    result = run([("a", whole(cost=LAW, kv_bytes_per_token=1e6))], arrivals, tiers=[host()])
    assert (result.cached_tokens, result.reloaded_tokens) == (256, 0)
    (tier,) = result.members[0].tiers
    assert (tier.asked_tokens, tier.held_tokens) == (272, 0)


@pytest.mark.parametrize("bad", [{"capacity": -1}, {"bytes_per_s": 0.0}])
def test_tiers_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="tier host"):
        host(**bad)  # type: ignore[arg-type]
