"""The scheduler: order, memory, prefix cache, errors, log. Arbitrary traffic is in test_traffic.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.calllog import RecordedScheduler, ReplayMismatch, replay
from paceline.core.config import SchedulerConfig
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, FinishReason, Rejected, RejectReason
from paceline.errors import ConfigError, PacelineError
from tests.core.driver import VOCAB, Run, make, rows, spec
from tests.core.memory_backend import EOS, expected_output


def test_running_before_waiting_in_one_mixed_batch() -> None:
    run = Run(make(max_num_batched_tokens=10))
    run.submit(spec("old", (1,) * 4, stop=()))
    run.step()
    run.submit(spec("new", (2,) * 30, stop=()))
    run.step()
    assert rows(run.plans[-1]) == {"old": 1, "new": 9}, "the decode first, then what is left of the budget"
    run.step()
    assert rows(run.plans[-1]) == {"old": 1, "new": 9}
    for _ in range(2):
        run.step()
    assert rows(run.plans[-1]) == {"old": 1, "new": 3}, "the last chunk is what remains"
    assert run.plans[-1].samples == (True, True)


def test_the_last_admitted_gives_way_and_comes_back_first() -> None:
    run = Run(make(num_blocks=6, prefix_caching=False))
    run.submit(spec("a", (1,) * 8, 12, stop=()))
    run.submit(spec("b", (2,) * 8, 12, stop=()))
    run.submit(spec("c", (3,) * 8, 12, stop=()))
    run.step()
    assert rows(run.plans[-1]) == {"a": 8, "b": 8, "c": 8}
    run.step()
    assert rows(run.plans[-1]) == {"a": 1, "b": 1}, "c gave its blocks"
    assert run.plans[-1].released == ("c",)
    run.finish()
    assert [run.finishes[name].preemptions for name in "abc"] == [0, 1, 1]
    assert [a.spec.request_id for plan in run.plans for a in plan.admitted] == ["a", "b", "c", "b", "c"]
    assert run.scheduler.stats().recomputed_tokens == sum(run.finishes[name].recomputed_tokens for name in "abc") > 0


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    run = Run(make(num_blocks=8))
    run.submit(spec("first", (1,) * 12, 8, stop=()))
    run.step()
    run.submit(spec("big", (2,) * 24, 4, stop=()))
    run.submit(spec("small", (3,) * 2, 2, stop=()))
    run.step()
    assert list(rows(run.plans[-1])) == ["first"]
    run.finish()
    assert run.finishes["small"].scheduled_s >= run.finishes["big"].scheduled_s  # type: ignore[operator]


def test_a_hit_never_covers_the_last_prompt_token() -> None:
    run = Run(make())
    prompt = tuple(range(1, 9))  # two whole blocks
    run.submit(spec("cold", prompt, 1))
    run.finish()
    run.submit(spec("warm", prompt, 1))
    run.step()
    assert run.plans[-1].starts == (4,), "the second block is computed again for its last token's logits"
    assert run.finishes["warm"].cached_tokens == 4
    assert run.scheduler.stats().prefix_hits_tokens == 4


def test_two_requests_of_one_step_share_what_the_first_computes() -> None:
    run = Run(make())
    prompt = tuple(range(1, 14))
    run.submit(spec("one", prompt, 4, stop=()))
    run.submit(spec("two", prompt, 4, stop=()))
    run.step()
    assert rows(run.plans[0]) == {"one": 13, "two": 1}
    assert run.scheduler.stats().kv_blocks_used == 5, "three shared blocks and a last one each: no copies"
    run.finish()
    assert run.tokens["one"] == run.tokens["two"]


def test_generated_tokens_are_cached_too() -> None:
    run = Run(make())
    run.submit(spec("turn-1", (1, 2, 3), 8, stop=()))
    run.finish()
    follow_up = (1, 2, 3, *run.tokens["turn-1"], 5, 6)
    run.submit(spec("turn-2", follow_up, 1))
    run.finish()
    assert run.finishes["turn-2"].cached_tokens == 8, "ten tokens were computed, two whole blocks of them"


@pytest.mark.parametrize("change", ["namespace", "salt"])
def test_other_weights_or_another_salt_share_nothing(change: str) -> None:
    names = []
    for value in ("a", "b"):
        scheduler = make(namespace=value if change == "namespace" else "")
        run = Run(scheduler)
        run.submit(spec("r", tuple(range(1, 20)), 1, salt=value if change == "salt" else ""))
        run.finish()
        names.append(set(scheduler._kv.pool._index))
    assert not names[0] & names[1]


@pytest.mark.parametrize(("first", "cached"), [(1, 4), (2, 8)])
def test_eviction_takes_the_least_recently_used_chain_from_its_end(first: int, cached: int) -> None:
    run = Run(make(num_blocks=8))
    for name, token in (("a", 1), ("b", 2)):
        run.submit(spec(name, (token,) * 12, 1))
        run.finish()
    run.submit(spec("c", (3,) * 16, 1))  # needs four blocks: two are blank, a's chain loses its last two
    run.finish()
    run.submit(spec("again", (first,) * 12, 1))
    run.step()
    assert run.plans[-1].starts == (cached,)


def test_a_failed_request_ends_alone_and_its_blocks_are_forgotten() -> None:
    run = Run(make(), fail=frozenset({"bad"}))
    run.submit(spec("bad", (1,) * 9, 4))
    run.submit(spec("good", (2,) * 9, 4, stop=()))
    run.finish()
    assert run.finishes["bad"].reason is FinishReason.ERROR
    assert run.finishes["bad"].message == "failed on purpose"
    assert run.finishes["good"].reason is FinishReason.LENGTH
    run.submit(spec("again", (1,) * 9, 1))
    run.step()
    assert run.plans[-1].starts == (0,)


def test_a_step_computes_for_everyone_else_when_one_is_cancelled_in_flight() -> None:
    run = Run(make(), depth=2)
    run.submit(spec("keep", (1,) * 6, 6, stop=()))
    run.submit(spec("drop", (2,) * 6, 6, stop=()))
    run.step()
    run.cancel("drop")
    run.cancel("drop")
    assert run.submit(spec("drop", (3,) * 6, 2, stop=())), "its name is free again, though a plan still holds it"
    first = run.finishes.pop("drop")
    assert first.reason is FinishReason.ABORT
    run.finish()
    assert run.finishes["keep"].output_tokens == 6
    assert run.tokens["drop"] == expected_output((3,) * 6, 8, frozenset(), VOCAB)


def test_rejections_name_the_numbers() -> None:
    scheduler = make(num_blocks=4, max_model_len=64, max_waiting=1)
    long = scheduler.submit(spec("long", (1,) * 64, 1), 0.0)
    assert isinstance(long, Rejected)
    assert long.reason is RejectReason.TOO_LONG
    assert "64 tokens, the context holds 64" in long.message
    large = scheduler.submit(spec("large", (1,) * 10, 20), 0.0)
    assert isinstance(large, Rejected)
    assert large.reason is RejectReason.TOO_LONG
    assert "30 tokens, the KV cache holds 16" in large.message
    assert isinstance(scheduler.submit(spec("fits", (1,) * 10, 7), 0.0), Accepted)
    twice = scheduler.submit(spec("fits", (1,), 1), 0.0)
    assert isinstance(twice, Rejected)
    assert twice.reason is RejectReason.DUPLICATE_ID
    full = scheduler.submit(spec("late", (1,), 1), 0.0)
    assert isinstance(full, Rejected)
    assert full.reason is RejectReason.QUEUE_FULL
    assert full.retry_after_s is not None


def test_max_model_len_ends_a_generation() -> None:
    run = Run(make(max_model_len=10))
    run.submit(spec("r", (1,) * 8, 100, stop=()))
    run.finish()
    assert run.finishes["r"].output_tokens == 2
    assert run.finishes["r"].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("block_size", 0), ("max_num_batched_tokens", -1), ("max_waiting", -1), ("policy", "lifo")],
)
def test_wrong_settings_are_named(field: str, value: object) -> None:
    values: dict[str, object] = {"num_blocks": 4, "max_model_len": 16, field: value}
    with pytest.raises(ConfigError, match=field):
        Scheduler(SchedulerConfig(**values))  # type: ignore[arg-type]


def record(path: Path) -> Run:
    with path.open("w") as file:
        run = Run(RecordedScheduler(SchedulerConfig(num_blocks=10, max_model_len=40, block_size=4), file))
        for number in range(6):
            run.submit(spec(f"r{number}", tuple(range(1, 4 + 3 * number)), 16, stop=(EOS,)))
            run.step()
        run.cancel("r4")
        run.finish()
    return run


def test_replay_notices_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    run = record(path)
    assert sum(finish.preemptions for finish in run.finishes.values()) > 0, "the log holds preemptions"
    assert replay(path) >= len(run.plans)
    with path.open("a") as file:
        file.write('{"call":"plan","now":')  # a crash cut the last line
    assert replay(path) >= len(run.plans)
    text = path.read_text()
    path.write_text(text.replace('"max_num_batched_tokens":2048', '"max_num_batched_tokens":5', 1))
    with pytest.raises(ReplayMismatch, match="plan"):
        replay(path)
    path.write_text("{}\n")
    with pytest.raises(PacelineError, match="not a call log"):
        replay(path)


def test_plans_are_the_same_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    run = record(path)
    code = f"from paceline.core.calllog import replay; print(replay({str(path)!r}))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert int(done.stdout) >= len(run.plans)
