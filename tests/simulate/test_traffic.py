"""Arrivals of plans and traces as requests: who shares what, when they come, what follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.prefix import chain_root, extend_chain
from paceline.errors import ConfigError
from paceline.measure.plan import Arrivals, BenchPlan, Length, Load, Prompts, Target, Trace
from paceline.simulate.backend import OUTPUT, STOP
from paceline.simulate.recorded import is_call_log, recorded
from paceline.simulate.traffic import Arrival, Traffic, planned

DATA = Path(__file__).parents[3] / "shared" / "data"


def trace_plan(path: Path, limit: int | None = None, **fields: object) -> BenchPlan:
    trace = Trace(path=str(path), limit=limit, **fields)  # type: ignore[arg-type]
    return BenchPlan(target=Target(url="simulated:"), load=Load(arrivals=Arrivals.TRACE), trace=trace)


def all_of(traffic: Traffic, takes_s: float = 0.0) -> Iterator[Arrival]:
    """Every arrival, if each ends `takes_s` after it was sent."""
    while traffic.next_s < math.inf:
        arrival = traffic.pop()
        yield arrival
        traffic.ended(arrival, arrival.sent_s + takes_s, ok=True)


def shared(one: Arrival, other: Arrival) -> int:
    """Leading tokens that two prompts have in common."""
    pairs = zip(one.spec.prompt, other.spec.prompt, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.spec.prompt,))))


def needs(path: Path) -> Path:
    if not path.is_file():
        pytest.skip(f"{path} is not beside the checkout")
    return path


def test_the_conversation_trace() -> None:
    traffic = planned(trace_plan(needs(DATA / "azure_conv_2023.csv"), limit=300))
    arrivals = list(all_of(traffic))
    assert len(arrivals) == traffic.total == 300
    assert (len(arrivals[0].spec.prompt), arrivals[0].output_tokens) == (374, 44)
    assert arrivals[0].at_s == 0.0
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    assert len({a.spec.prompt[0] for a in arrivals}) == 300, "nobody shares anything"
    assert all(a.spec.sampling.max_tokens == a.output_tokens and a.answer is None for a in arrivals)
    faster = list(all_of(planned(trace_plan(DATA / "azure_conv_2023.csv", limit=300, speed=4.0))))
    assert faster[-1].at_s == pytest.approx(arrivals[-1].at_s / 4)


def test_blocks_of_the_mooncake_trace_are_shared_as_it_says() -> None:
    """Hits of an endless cache are those that the trace's own ids give."""
    path = needs(DATA / "mooncake_conversation.jsonl")
    arrivals = list(all_of(planned(trace_plan(path, limit=400))))
    seen: set[int] = set()
    names: set[bytes] = set()
    expected = found = 0
    for arrival in arrivals:
        assert arrival.planned is not None
        blocks = arrival.planned.blocks
        whole = len(arrival.spec.prompt) // 512
        hit = next((place for place, block in enumerate(blocks[:whole]) if block not in seen), whole)
        expected += hit
        seen.update(blocks)
        chain: list[bytes] = []
        extend_chain(chain, chain_root("", ""), arrival.spec.prompt, 512, whole)
        found += next((place for place, name in enumerate(chain) if name not in names), whole)
        names.update(chain)
    assert found == expected > 300


def test_sixteen_token_blocks_of_a_measured_run() -> None:
    path = needs(DATA / "vllm_measured" / "sharegpt-llama-3.1-8b-300-sps10.lengths.jsonl")
    arrivals = list(all_of(planned(trace_plan(path))))
    assert len(arrivals) == 300
    assert len(arrivals[0].spec.prompt) == 2358
    assert arrivals[0].output_tokens == 531
    first, second = (arrival.planned for arrival in arrivals[:2])
    assert first is not None
    assert second is not None
    assert first.block_tokens == 16
    alike = next((i for i, (a, b) in enumerate(zip(first.blocks, second.blocks, strict=False)) if a != b), 0)
    assert shared(arrivals[0], arrivals[1]) == 16 * alike


def test_a_shared_prefix_is_inside_the_prompt() -> None:
    prompts = Prompts(input=Length(value=100), prefix_tokens=64, prefix_groups=2)
    load = Load(arrivals=Arrivals.POISSON, rate=1.0, requests=30)
    plan = BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts)
    arrivals = list(all_of(planned(plan)))
    assert {len(arrival.spec.prompt) for arrival in arrivals} == {100}
    assert {shared(arrivals[0], other) for other in arrivals[1:]} == {0, 64}


def test_clients_may_ask_for_more_than_they_get() -> None:
    load = Load(arrivals=Arrivals.POISSON, rate=1.0, requests=20)
    prompts = Prompts(output=Length(kind="uniform", low=1, high=100))
    plan = BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts)
    for arrival in all_of(planned(plan, max_tokens=50)):
        if arrival.output_tokens >= 50:
            assert arrival.spec.sampling.max_tokens == arrival.output_tokens
            assert arrival.answer is None
        else:
            assert arrival.spec.sampling.max_tokens == 50
            assert arrival.answer == (OUTPUT,) * (arrival.output_tokens - 1) + (STOP,)


def test_classes_are_drawn_by_share_and_do_not_move() -> None:
    load = Load(arrivals=Arrivals.POISSON, rate=1.0, requests=400)
    plan = BenchPlan(target=Target(url="simulated:"), load=load)
    shares = {"interactive": 1.0, "batch": 3.0}
    classes = [arrival.spec.traffic_class for arrival in all_of(planned(plan, class_shares=shares))]
    assert set(classes) == set(shares)
    assert 0.18 < classes.count("interactive") / 400 < 0.32
    fewer = msgspec.structs.replace(plan, load=msgspec.structs.replace(load, requests=100))
    assert [a.spec.traffic_class for a in all_of(planned(fewer, class_shares=shares))] == classes[:100]
    with pytest.raises(ConfigError, match="class shares"):
        planned(plan, class_shares={"batch": 0.0})


@given(
    cap=st.none() | st.integers(1, 4), takes_s=st.floats(0.0, 3.0), turns=st.integers(1, 3), rate=st.floats(0.5, 20.0)
)
@settings(max_examples=50, deadline=None)
def test_nobody_is_sent_before_he_is_due(cap: int | None, takes_s: float, turns: int, rate: float) -> None:
    load = Load(arrivals=Arrivals.POISSON, rate=rate, requests=12, max_concurrency=cap)
    prompts = Prompts(input=Length(value=8), output=Length(value=4), turns=Length(value=turns))
    plan = BenchPlan(target=Target(url="simulated:"), load=load, prompts=prompts)
    traffic = planned(plan)
    ends: list[tuple[float, Arrival]] = []
    sent: list[Arrival] = []
    while traffic.next_s < math.inf or ends:
        if ends and ends[0][0] <= traffic.next_s:
            at_s, arrival = ends.pop(0)
            traffic.ended(arrival, at_s, ok=True)
            continue
        due_s = traffic.next_s
        arrival = traffic.pop()
        assert arrival.sent_s == due_s >= arrival.at_s
        assert not sent or due_s >= sent[-1].sent_s
        sent.append(arrival)
        ends.append((due_s + takes_s, arrival))
        assert cap is None or len(ends) <= cap
    assert len(sent) == 12 * turns == traffic.total
    assert len({arrival.spec.request_id for arrival in sent}) == len(sent)


def test_malformed_traces_name_the_line(tmp_path: Path) -> None:
    bad = tmp_path / "trace.jsonl"
    bad.write_text('{"at_s": 0, "input_tokens": 10}\n{"at_s": 1, "input_tokens": "many"}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: input_tokens is 'many'; it must be a whole number"):
        planned(trace_plan(bad))
    log = tmp_path / "calls.jsonl"
    log.write_text('{"log":1,"config":{}}\n')
    assert is_call_log(log)
    assert not is_call_log(bad)
    assert not is_call_log(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"calls\.jsonl:1: not a line of a call log"):
        recorded(log)


@pytest.mark.parametrize("weight", [-1.0, 0.0, math.nan, math.inf])
def test_shares_that_are_none_are_refused(weight: float) -> None:
    plan = BenchPlan(target=Target(url="x", model="m"), load=Load(arrivals=Arrivals.POISSON, rate=1.0, requests=3))
    with pytest.raises(ConfigError, match="class shares"):
        planned(plan, class_shares={"standard": weight})


def test_prompts_that_no_engine_takes_are_refused_before_the_run_and_empty_ones_have_a_token() -> None:
    def plan(tokens: int) -> BenchPlan:
        load = Load(arrivals=Arrivals.POISSON, rate=1.0, requests=3)
        return BenchPlan(
            target=Target(url="x", model="m"), load=load, prompts=Prompts(input=Length(kind="fixed", value=tokens))
        )

    with pytest.raises(ConfigError, match="a prompt of more than"):
        planned(plan(10**9))
    assert [len(arrival.spec.prompt) for arrival in all_of(planned(plan(0)))] == [1, 1, 1]
