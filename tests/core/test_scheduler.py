"""The scheduler under arbitrary traffic, against a memory that notices every wrong block."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.calllog import RecordedScheduler, ReplayMismatch, replay
from paceline.core.config import SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step import Accepted, Finish, FinishReason, Rejected, RejectReason, RequestSpec, StepEvents, StepPlan
from paceline.errors import ConfigError, PacelineError
from tests.core.memory_backend import EOS, MemoryBackend, expected_output

VOCAB = 50


def spec(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 8,
    *,
    salt: str = "",
    stop: tuple[int, ...] = (EOS,),
    prompt_logprobs: int | None = None,
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, prompt_logprobs=prompt_logprobs)
    return RequestSpec(name, prompt, sampling, cache_salt=salt)


def make(num_blocks: int = 64, **settings: object) -> Scheduler:
    values: dict[str, object] = {"max_model_len": 256, "block_size": 4, **settings}
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **values))  # type: ignore[arg-type]


class Run:
    """Drives a scheduler and keeps what clients would have seen. `depth` plans may be in flight at once."""

    def __init__(self, scheduler: Scheduler, *, depth: int = 1, fail: frozenset[str] = frozenset()) -> None:
        self.scheduler = scheduler
        config = scheduler.config
        self.backend = MemoryBackend(config.num_blocks, config.block_size, VOCAB, fail)
        self.depth = depth
        self.now = 0.0
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}

    def submit(self, request: RequestSpec) -> bool:
        return isinstance(self.scheduler.submit(request, self.now), Accepted)

    def cancel(self, name: str) -> None:
        finish = self.scheduler.cancel(name, self.now)
        if finish is not None:
            self._take(StepEvents(-1, finished=(finish,)))

    def step(self) -> bool:
        self.now += 1.0
        plan = self.scheduler.plan(self.now) if len(self.in_flight) < self.depth else None
        self.scheduler.check_integrity()
        if plan is not None:
            assert 0 < plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
            self.plans.append(plan)
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            oldest = self.in_flight.popleft()
            self._take(self.scheduler.commit(oldest, self.backend.execute(oldest), self.now))
            self.scheduler.check_integrity()
            return True
        return plan is not None

    def finish(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            assert self.step(), "live requests, and nothing to do"

    def _take(self, events: StepEvents) -> None:
        for name, tokens in zip(events.ids, events.tokens, strict=True):
            assert name not in self.finishes, "a token after the terminal event"
            self.tokens.setdefault(name, []).extend(tokens)
        for name, scores in events.prompt_logprobs:
            self.scores.setdefault(name, []).extend(score.token for score in scores)
        for finish in events.finished:
            assert finish.request_id not in self.finishes, "two terminal events"
            self.finishes[finish.request_id] = finish


def rows(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.ids, plan.counts, strict=True))


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40).map(tuple)  # a small alphabet: prefixes collide
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 20), st.sampled_from(["", "a"]), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("steps"), st.integers(1, 5)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(3, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    budget=st.sampled_from([1, 3, 16, 512]),
    seats=st.integers(1, 8),
    caching=st.booleans(),
    depth=st.integers(1, 3),
)
def test_any_traffic_conserves_blocks_and_answers_everyone(
    actions: list[tuple[object, ...]],
    num_blocks: int,
    block_size: int,
    budget: int,
    seats: int,
    caching: bool,
    depth: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    log = io.StringIO()
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=256,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        prefix_caching=caching,
    )
    run = Run(RecordedScheduler(config, log), depth=depth)
    accepted: dict[str, RequestSpec] = {}
    for action in actions:
        match action:
            case ("submit", tuple() as prompt, int() as max_tokens, str() as salt, bool() as scored):
                name = f"r{len(accepted)}"
                request = spec(name, prompt, max_tokens, salt=salt, prompt_logprobs=0 if scored else None)
                if run.submit(request):
                    accepted[name] = request
            case ("cancel", int() as which):
                run.cancel(f"r{which}")
            case ("steps", int() as count):
                for _ in range(count):
                    run.step()
    run.finish()

    assert set(run.finishes) == set(accepted), "exactly one terminal event each"
    for name, request in accepted.items():
        finish = run.finishes[name]
        limit = len(request.prompt) + request.sampling.max_tokens
        wanted = expected_output(request.prompt, limit, frozenset({EOS}), VOCAB)
        got = run.tokens.get(name, [])
        assert finish.output_tokens == len(got)
        if finish.reason is FinishReason.ABORT:
            assert got == wanted[: len(got)]
            continue
        assert got == wanted, "outputs do not depend on what else ran"
        assert finish.reason is (FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH)
        if request.sampling.prompt_logprobs is not None:
            assert run.scores.get(name, []) == list(request.prompt[1:]), "each prompt token is scored once"
    stats = run.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)

    path = tmp_path_factory.mktemp("log") / "calls.jsonl"
    path.write_text(log.getvalue())
    assert replay(path) >= len(run.plans), "the log makes the same plans again"


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
