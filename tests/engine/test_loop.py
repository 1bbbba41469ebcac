"""The loop in process: the same calls as in the engine process, without sockets."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import SchedulerConfig
from paceline.core.step import Accepted, Finish, FinishReason, Rejected, RejectReason, StepEvents, StepPlan
from paceline.engine.loop import EngineLoop, EngineStalled, RecoverableError, StepFailed
from paceline.errors import EngineDead
from tests.engine.fakes import ChainBackend, StallingScheduler, expected_output, make_scheduler, misbehave, spec


class Ledger:
    """Collects events and holds them to their promises."""

    def __init__(self) -> None:
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.finished: dict[str, Finish] = {}

    def take(self, events: StepEvents) -> None:
        for request_id, tokens in zip(events.ids, events.tokens, strict=True):
            assert request_id not in self.finished, "tokens after the end"
            self.tokens[request_id] = self.tokens.get(request_id, ()) + tokens
        for finish in events.finished:
            self.end(finish)

    def end(self, finish: Finish) -> None:
        assert finish.request_id not in self.finished, "two terminal events"
        self.finished[finish.request_id] = finish


class TickingClock:
    """Moves a little with every look."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 0.001
        return self.time


def run(loop: EngineLoop, ledger: Ledger | None = None) -> Ledger:
    ledger = ledger or Ledger()
    for events in loop.run():
        ledger.take(events)
    return ledger


def test_outputs_are_the_backends() -> None:
    loop = EngineLoop(make_scheduler(prefix_caching=False), ChainBackend(), TickingClock(), debug=True)
    prompts = [tuple(range(1, length + 1)) for length in (1, 5, 700, 1300)]
    for index, prompt in enumerate(prompts):
        assert isinstance(loop.submit(spec(f"r{index}", prompt, 20)), Accepted)
    ledger = run(loop)
    for index, prompt in enumerate(prompts):
        assert ledger.tokens[f"r{index}"] == expected_output(prompt, 20)
        assert ledger.finished[f"r{index}"].reason is FinishReason.LENGTH
    assert loop.live == ()
    stats = loop.stats(of_step=True)
    assert stats.steps > 20
    assert stats.step_tokens == sum(map(len, prompts)) + 4 * 19
    assert stats.last_step is not None
    assert loop.stats().last_step is None


def test_rejections_leave_nothing_behind() -> None:
    loop = EngineLoop(make_scheduler(max_waiting=1), ChainBackend())
    assert isinstance(loop.submit(spec("a")), Accepted)
    full = loop.submit(spec("b"))
    assert isinstance(full, Rejected)
    assert full.reason is RejectReason.QUEUE_FULL
    twice = loop.submit(spec("a"))
    assert isinstance(twice, Rejected)
    assert twice.reason is RejectReason.DUPLICATE_ID
    assert loop.live == ("a",)
    assert set(run(loop).finished) == {"a"}


def test_cancel_is_idempotent() -> None:
    loop = EngineLoop(make_scheduler(), ChainBackend())
    loop.submit(spec("a"))
    loop.step()
    finish = loop.cancel("a", FinishReason.STOP)
    assert finish is not None
    assert finish.reason is FinishReason.STOP
    assert loop.cancel("a") is None
    assert loop.cancel("never seen") is None
    assert not loop.has_work
    assert loop.step() is None
    assert loop.scheduler.stats().kv_blocks_used == 0


def test_a_failing_backend_ends_every_request_with_its_error() -> None:
    backend = ChainBackend(misbehave({"what": "raise", "at_step": 2}))
    loop = EngineLoop(make_scheduler(max_num_seqs=2), backend, debug=True)
    for index in range(5):  # two run, three wait
        loop.submit(spec(f"r{index}"))
    ledger = Ledger()
    with pytest.raises(StepFailed, match="ValueError: the matrix is singular") as caught:
        run(loop, ledger)
    ledger.take(caught.value.events)
    assert set(ledger.finished) == {f"r{index}" for index in range(5)}
    for finish in ledger.finished.values():
        assert finish.reason is FinishReason.ERROR
        assert finish.message == "ValueError: the matrix is singular"
    assert loop.stats().errors == 5
    assert isinstance(caught.value.__cause__, ValueError)
    loop.scheduler.check_integrity()


def test_an_interrupted_step_leaves_a_loop_that_says_so() -> None:
    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    loop = EngineLoop(make_scheduler(), ChainBackend(interrupt))
    loop.submit(spec("a"))
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    with pytest.raises(EngineDead, match="KeyboardInterrupt"):
        loop.step()
    with pytest.raises(EngineDead, match="make a new one"):
        loop.submit(spec("b"))


def test_a_recoverable_failure_ends_its_own_batch_alone() -> None:
    backend = ChainBackend(misbehave({"what": "recoverable", "at_step": 2}))
    loop = EngineLoop(make_scheduler(max_num_seqs=2), backend, debug=True)
    for index in range(5):
        loop.submit(spec(f"r{index}", (index + 1,), 6))
    ledger = run(loop)
    failed = [i for i, finish in ledger.finished.items() if finish.reason is FinishReason.ERROR]
    assert failed == ["r0", "r1"]
    for index in range(2, 5):
        assert ledger.tokens[f"r{index}"] == expected_output((index + 1,), 6)


def test_any_exception_can_be_marked_recoverable() -> None:
    class OutOfMemory(RuntimeError):
        recoverable = True

    def fail_once(plan: StepPlan) -> None:
        if plan.step == 0:
            raise OutOfMemory

    loop = EngineLoop(make_scheduler(), ChainBackend(fail_once))
    loop.submit(spec("a"))
    assert run(loop).finished["a"].message == "OutOfMemory"


def test_a_scheduler_that_plans_nothing_is_an_error_with_a_dump(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = StallingScheduler(SchedulerConfig(num_blocks=16, max_model_len=64))
    loop = EngineLoop(scheduler, ChainBackend(), stall_limit=7)
    for index in range(30):
        loop.submit(spec(f"r{index}"))
    for _ in range(6):
        assert loop.step() is None
    with caplog.at_level(logging.ERROR, "paceline.engine"), pytest.raises(EngineStalled, match="7 times") as caught:
        loop.step()
    assert len(caught.value.events.finished) == 30
    assert "num_waiting=30" in caplog.text
    assert "r0: 3 prompt tokens" in caplog.text
    assert "and 10 more" in caplog.text
    assert not loop.has_work


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 60), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 40), st.sampled_from(FinishReason)),
    st.tuples(st.just("step"), st.integers(1, 5), st.none()),
)


@settings(deadline=None, max_examples=150)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    num_blocks=st.integers(4, 40),
    budget=st.sampled_from([4, 16, 64]),
    max_num_seqs=st.integers(1, 8),
    failing=st.sets(st.integers(0, 40), max_size=3),
)
def test_every_accepted_request_ends_once_and_whole(
    actions: list[tuple[str, int, object]], num_blocks: int, budget: int, max_num_seqs: int, failing: set[int]
) -> None:
    """Arrivals, cancellations and failing steps in any order: one Finish each, no token lost or changed, no leak."""

    def before_step(plan: StepPlan) -> None:
        if plan.step in failing:
            raise RecoverableError("unlucky")

    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_model_len=128,
        block_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_waiting=10,
    )
    loop = EngineLoop(scheduler, ChainBackend(before_step), TickingClock(), debug=True)
    ledger = Ledger()
    accepted: dict[str, tuple[tuple[int, ...], int]] = {}
    submitted = 0
    for kind, first, second in actions:
        if kind == "submit":
            assert isinstance(second, int)
            prompt = tuple((submitted * 13 + at) % 50 for at in range(first))
            if isinstance(loop.submit(spec(f"r{submitted}", prompt, second)), Accepted):
                accepted[f"r{submitted}"] = (prompt, second)
            submitted += 1
        elif kind == "cancel":
            assert isinstance(second, FinishReason)
            if (finish := loop.cancel(f"r{first}", second)) is not None:
                ledger.end(finish)
        else:
            for _ in range(first):
                if (events := loop.step()) is not None:
                    ledger.take(events)
        assert set(loop.live) == set(accepted) - set(ledger.finished)
    for events in loop.run():
        ledger.take(events)
    assert set(ledger.finished) == set(accepted)
    for request_id, (prompt, max_tokens) in accepted.items():
        tokens = ledger.tokens.get(request_id, ())
        expected = expected_output(prompt, max_tokens)
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == ledger.finished[request_id].output_tokens
    assert loop.live == ()
    assert scheduler.stats().kv_blocks_used == 0


def test_a_policy_that_waits_on_purpose_is_not_a_stall() -> None:
    policy = {"policy": "dynamic", "policy_options": (("batch_size", 4), ("delay_s", 0.2))}
    loop = EngineLoop(make_scheduler(**policy), ChainBackend(), stall_limit=2)
    loop.submit(spec("alone", (1, 2, 3), 2))
    for _ in range(5):
        assert loop.step() is None
    assert loop.rest_s is not None
    assert 0.0 < loop.rest_s <= 0.2
    finished = [finish.request_id for events in loop.run() for finish in events.finished]
    assert finished == ["alone"], "the batch closes when its delay is over"


def test_every_preemption_is_told_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    loop = EngineLoop(make_scheduler(num_blocks=8, prefix_caching=False), ChainBackend(), TickingClock(), debug=True)
    for name in ("a", "b", "c"):
        loop.submit(spec(name, tuple(range(1, 31)), 60))
    with caplog.at_level(logging.INFO, logger="paceline.engine"):
        ledger = run(loop)
    told = [record.getMessage() for record in caplog.records if "is preempted" in record.getMessage()]
    assert len(told) == loop.stats().scheduler.preemptions == sum(end.preemptions for end in ledger.finished.values())
    assert told, "the pool holds half of what they need"
    assert all("of class standard" in line and "8 KV blocks" in line for line in told)
    assert not any("has 0 tokens" in line for line in told)
