"""Prefill here, decode there: times on the wire, room at the receiver, and what a slow link does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.simulate.fleet.blueprint import Role
from paceline.simulate.fleet.link import Link, LinkSpec, send
from tests.simulate.fleets import config, pools, request, run, whole
from tests.simulate.laws import Linear

LAW = Linear(0.010, 1e-4, 0.0)


def test_the_first_token_is_the_prefill_engines_and_the_kv_travels() -> None:
    # 32 tokens of prefill: 13.2 ms. 32 tokens of 1 MB at 1 GB/s: 32 ms, and 1 ms of latency. A decode step: 10.1 ms.
    members = pools(1, 1, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9, 0.001))
    result = run(members, [request(0, prompt=32, output=3)])
    (journey,) = result.done
    assert journey.token_s == pytest.approx([0.0132, 0.0132 + 0.033 + 0.0101, 0.0132 + 0.033 + 0.0202])
    assert journey.transfer_s == pytest.approx(0.033)
    assert (result.transfers.count, result.transfers.bytes) == (1, 32e6)
    assert journey.replica == "d0"


def test_without_a_network_kv_arrives_in_no_time() -> None:
    (journey,) = run(pools(1, 1, cost=LAW), [request(0, prompt=32, output=2)]).done
    assert journey.token_s == pytest.approx([0.0132, 0.0132 + 0.0101])


def test_one_token_needs_no_decode_engine() -> None:
    result = run(pools(1, 1, cost=LAW), [request(0, output=1)])
    assert result.done[0].replica == "p0"
    assert result.transfers.count == 0


def test_a_prompt_that_is_no_whole_number_of_blocks_computes_its_rest_again() -> None:
    # 30 tokens and the first output: 16 are adopted, 15 computed with the second output.
    (journey,) = run(pools(1, 1, cost=LAW), [request(0, prompt=30, output=2)]).done
    assert journey.token_s[1] - journey.token_s[0] == pytest.approx(0.010 + 15e-4)


def test_blocks_that_the_receiver_holds_do_not_travel_again() -> None:
    members = pools(1, 1, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9))
    prompt = tuple(range(2, 34))
    result = run(members, [request(0, output=2, tokens=prompt), request(1, at_s=1.0, output=2, tokens=prompt)])
    assert result.transfers.bytes == 32e6


def test_transfers_of_one_sender_wait_for_each_other() -> None:
    members = pools(1, 2, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9))
    result = run(members, [request(i, prompt=32, output=2) for i in range(2)])
    first, second = sorted(journey.transfer_s for journey in result.done)
    # One step prefills both; without room for both in a step the second would have waited less.
    assert (first, second) == pytest.approx((0.032, 0.064))


def test_layers_that_leave_while_the_prompt_is_computed_hide_the_wire() -> None:
    members = pools(1, 1, cost=LAW, kv_bytes_per_token=1e5, network=LinkSpec(1e9))  # 3.2 ms against 13.2 ms of prefill
    after, beside = (
        run(members, [request(0, prompt=32, output=2)], overlap_layers=layers).done[0].transfer_s
        for layers in (None, 16)
    )
    assert after == pytest.approx(0.0032)
    assert beside == pytest.approx(0.0032 / 16)  # the last layer
    slow = pools(1, 1, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9))  # 32 ms against 13.2 ms
    (journey,) = run(slow, [request(0, prompt=32, output=2)], overlap_layers=16).done
    assert journey.transfer_s == pytest.approx(0.032 - 0.0132)


def test_a_full_decode_engine_lets_kv_wait_at_the_sender() -> None:
    small = config(num_blocks=8)
    members = pools(1, 1, cost=LAW, config=small)
    result = run(members, [request(i, prompt=48, output=30) for i in range(4)])  # 5 blocks each at their ends
    starts = sorted(journey.token_s[1] for journey in result.done)
    assert starts[2] > min(journey.token_s[-1] for journey in result.done)
    assert result.transfers.waiting_s > 0.2


def test_decodes_are_not_disturbed_by_prefills() -> None:
    long = [request(9 + i, at_s=0.1 + 0.1 * i, prompt=400, output=2) for i in range(5)]
    mixed = run([("w", whole(cost=LAW))], [request(0, output=60), *long])
    apart = run(pools(1, 1, cost=LAW), [request(0, output=60), *long])
    assert max(mixed.journeys[0].gaps_s()) > 0.045
    assert max(apart.journeys[0].gaps_s()[1:]) < 0.012


def test_chips_of_the_two_pools_may_differ() -> None:
    fast = whole(cost=Linear(0.001, 1e-5, 0.0), role=Role.PREFILL, price_per_chip_hour=10.0)
    slow = replace(fast, cost=LAW, role=Role.DECODE, price_per_chip_hour=1.0)
    result = run([("p", fast), ("d", slow)], [request(0, prompt=32, output=2)])
    assert result.done[0].token_s == pytest.approx([0.00132, 0.00132 + 0.0101])
    assert result.cost == pytest.approx(11.0 * result.end_s / 3600)


def test_links_queue_and_the_slower_end_decides() -> None:
    out, into = Link(LinkSpec(2e9, 0.001)), Link(LinkSpec(1e9))
    assert send(0.0, 1e9, out, into) == pytest.approx(1.001)
    assert send(0.5, 1e9, out, into) == pytest.approx(2.001)
    assert out.busy_s == pytest.approx(1.0)
    assert into.busy_s == pytest.approx(2.0)


def test_no_link_carries_more_than_it_can_however_early_layers_leave() -> None:
    members = pools(1, 1, cost=LAW, kv_bytes_per_token=1e6, network=LinkSpec(1e9))  # 32 ms a prompt, 13.2 to compute it
    arrivals = [request(i, at_s=0.02 * i, prompt=32, output=2) for i in range(20)]
    result = run(members, arrivals, overlap_layers=16)
    assert max(journey.token_s[1] for journey in result.done) > 20 * 0.032


def test_prompts_wait_for_decode_engines_that_start_cold() -> None:
    members = pools(1, 1, cost=LAW)
    members[1] = ("d0", replace(members[1][1], cold_start_s=5.0))
    (journey,) = run(members, [request(0, prompt=32, output=2)], cold=True).done
    assert journey.token_s == pytest.approx([0.0132, 5.0 + 0.0101])
    assert not journey.losses
