"""Every policy under arbitrary traffic, against a memory that notices every wrong block."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.calllog import RecordedScheduler, replay
from paceline.core.config import SchedulerConfig
from paceline.core.policies.registry import POLICIES
from paceline.core.shape import StepShape
from paceline.core.step import FinishReason, RequestSpec
from paceline.cost.online import OnlineCost
from tests.core.driver import VOCAB, Run, spec
from tests.core.memory_backend import EOS, expected_output

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40).map(tuple)  # a small alphabet: prefixes collide
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 20), st.sampled_from(["", "a"]), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("steps"), st.integers(1, 5)),
    ),
    max_size=40,
)
BUDGETED = {"decode_first"}  # policies that keep to max_num_batched_tokens
VARIANTS: dict[str, list[dict[str, bool | int | float | str]]] = {
    "decode_first": [
        {},
        {"order": "priority"},
        {"long_prefill_threshold": 5, "watermark": 0.2},
        {"chunked": False},
    ],
    "dynamic": [{"batch_size": 3, "delay_s": 2.0}],
    "max_utilization": [{}, {"chunking": "first_come", "unit": 4, "max_num_tokens": 16}],
    "no_evict": [{}, {"chunking": "equal_progress", "unit": 4, "max_num_tokens": 16}, {"chunking": "first_come"}],
    "orca": [{}],
    "prefill_first": [
        {"chunk": 16},
        {"chunk": 16, "mixed": True, "order": "lpm"},
        {"chunk": 64, "interval": 2, "order": "hrrn"},
        {"order": "dfs_weight"},
        {"order": "lof", "conservativeness": 0.1},
    ],
    "sarathi": [{"chunk": 8}],
    "slo": [{}, {"pace": "timeline", "floor": 2, "partial": 1}, {"late_share": 0.5}],
    "static": [{"batch_size": 3}],
    "static_batch": [{}, {"chunking": "first_come", "max_num_tokens": 32, "unit": 16}],
}
KNOBS = [(name, tuple(options.items())) for name, variants in VARIANTS.items() for options in variants]


def machine(shape: StepShape) -> float:
    return 0.03 + 0.004 * shape.tokens


def test_every_policy_is_driven_here() -> None:
    assert set(VARIANTS) == set(POLICIES)


@pytest.mark.parametrize(("policy", "options"), KNOBS)
@settings(max_examples=60, deadline=None)
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
    policy: str,
    options: tuple[tuple[str, bool | int | float | str], ...],
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
        policy=policy,
        policy_options=options,
    )
    cost = OnlineCost() if policy == "slo" else None
    run = Run(RecordedScheduler(config, log, cost), depth=depth, takes_s=machine)
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
    for request in accepted.values():
        check_output(run, request)
    if policy in BUDGETED and ("chunked", False) not in options:
        assert all(plan.num_tokens <= budget for plan in run.plans)
    stats = run.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)

    path = tmp_path_factory.mktemp("log") / "calls.jsonl"
    path.write_text(log.getvalue())
    assert replay(path, OnlineCost() if policy == "slo" else None) >= len(run.plans), (
        "the log makes the same plans again"
    )


def check_output(run: Run, request: RequestSpec) -> None:
    name = request.request_id
    finish = run.finishes[name]
    limit = len(request.prompt) + request.sampling.max_tokens
    wanted = expected_output(request.prompt, limit, frozenset({EOS}), VOCAB)
    got = run.tokens.get(name, [])
    assert finish.output_tokens == len(got)
    if finish.reason is FinishReason.ABORT:
        assert got == wanted[: len(got)]
        return
    assert got == wanted, "outputs do not depend on what else ran"
    assert finish.reason is (FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH)
    if request.sampling.prompt_logprobs is not None:
        assert run.scores.get(name, []) == list(request.prompt[1:]), "each prompt token is scored once"
