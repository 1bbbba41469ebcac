"""KV that comes from elsewhere: the prefix cache takes it in, within what is free, and a replay does the same."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.calllog import RecordedScheduler, replay
from paceline.core.config import SchedulerConfig
from paceline.core.step import StepResult
from tests.core.driver import make, spec

PROMPT = tuple(range(2, 15))  # 13 tokens: three whole blocks of 4


def test_a_request_computes_only_what_was_not_adopted() -> None:
    scheduler = make()
    assert scheduler.held(PROMPT) == 0
    assert scheduler.adopt(PROMPT) == scheduler.held(PROMPT) == 12
    scheduler.check_integrity()
    scheduler.submit(spec("a", PROMPT), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert (plan.starts, plan.counts) == ((12,), (1,))
    assert plan.admitted[0].cached_tokens == 12


def test_another_salt_finds_nothing() -> None:
    scheduler = make()
    scheduler.adopt(PROMPT, salt="theirs")
    assert scheduler.held(PROMPT) == 0
    assert scheduler.held(PROMPT, salt="theirs") == 12


def test_without_a_prefix_cache_nothing_is_taken_in() -> None:
    scheduler = make(prefix_caching=False)
    assert scheduler.adopt(PROMPT) == 0


@given(st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=30), max_size=8), st.integers(8, 12))
def test_adopting_never_takes_what_is_held(prompts: list[list[int]], num_blocks: int) -> None:
    scheduler = make(num_blocks=num_blocks)
    scheduler.submit(spec("a", tuple(range(5, 20))), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    for prompt in prompts:
        taken = scheduler.adopt(prompt)
        assert taken == scheduler.held(prompt) <= len(prompt) // 4 * 4
        assert taken == len(prompt) // 4 * 4 or scheduler.stats().kv_blocks_used == 4
        scheduler.check_integrity()
    scheduler.commit(plan, StepResult(plan.step, ((5,),)), 1.0)
    scheduler.check_integrity()


def test_it_is_part_of_the_call_log(tmp_path: Path) -> None:
    with open(tmp_path / "calls.jsonl", "w", encoding="utf-8") as file:
        scheduler = RecordedScheduler(SchedulerConfig(num_blocks=16, max_model_len=64, block_size=4), file)
        scheduler.adopt(PROMPT)
        scheduler.submit(spec("a", PROMPT), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None
        assert plan.counts == (1,)
    assert replay(tmp_path / "calls.jsonl") == 1
