"""The backend, driven by plans written by hand: the default model against transformers, then each duty on its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.step import Admission, RequestSpec, StepPlan, StepResult
from paceline.runtime.backend import NOT_FINITE, ModelBackend, OutOfMemory
from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool, KVSpec
from paceline.runtime.load import LoadedModel, ModelInfo
from tests.runtime.reference import Reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


class Plans:
    """Writes plans one after the other and hands them to a backend."""

    def __init__(self, backend: ModelBackend) -> None:
        self.backend = backend
        self.step = 0

    def run(
        self,
        rows: list[tuple[str, int, int, tuple[int, ...], bool]],
        *,
        admitted: tuple[Admission, ...] = (),
        released: tuple[str, ...] = (),
    ) -> StepResult:
        """Rows are (id, start, count, new blocks, samples)."""
        ids, starts, counts, blocks, samples = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        plan = StepPlan(self.step, ids, starts, counts, blocks, samples, admitted, released)
        result = self.backend.execute(plan)
        assert result.step == self.step
        assert len(result.tokens) == len(rows)
        assert result.seconds > 0
        self.step += 1
        return result


def admit(name: str, prompt: Any, sampling: SamplingParams = GREEDY, outputs: Any = (), cached: int = 0) -> Admission:
    return Admission(RequestSpec(name, tuple(prompt), sampling), tuple(outputs), cached)


# --- the default model ----------------------------------------------------------------------------------------------


def test_the_default_model_equals_transformers(default_model: LoadedModel, reference: Reference) -> None:
    """Chunked prefill, decodes beside it, a preemption that keeps half in the prefix cache, and a new neighbour."""
    plans = Plans(ModelBackend(default_model, num_blocks=12, block_size=16))
    a, b = tuple(range(1000, 1050)), (504, 3575, 282)
    out: dict[str, list[int]] = {"a": [], "b": []}

    def run(rows: list[tuple[str, int, int, tuple[int, ...], bool]], **changes: Any) -> None:
        for row, tokens in zip(rows, plans.run(rows, **changes).tokens, strict=True):
            assert len(tokens) == row[4]
            out[row[0]] += tokens

    run([("b", 0, 3, (5,), True), ("a", 0, 20, (3, 1), False)], admitted=(admit("a", a), admit("b", b)))
    run([("b", 3, 1, (), True), ("a", 20, 30, (4, 7), True)])
    for step in range(5):
        run([("a", 50 + step, 1, (), True), ("b", 4 + step, 1, (), True)])
    # a leaves; its first two blocks stay in the cache, and it resumes on top of them.
    run([("b", 9, 1, (), True)], released=("a",))
    resumed = admit("a", a, outputs=out["a"], cached=32)
    run([("b", 10, 1, (), True), ("a", 32, 24, (3, 1, 0, 2), True)], admitted=(resumed,))
    for step in range(6):
        run([("b", 11 + step, 1, (11,) if step == 5 else (), True), ("a", 56 + step, 1, (), True)])
    for prompt, ours in ((a, out["a"]), (b, out["b"])):
        greedy = reference.greedy(prompt, len(ours), guess=ours)
        assert greedy.first_difference(ours) is None
    assert len(out["a"]) == 13
    assert len(out["b"]) == 15


def test_prompt_logprobs_equal_transformers(default_model: LoadedModel, reference: Reference) -> None:
    """Scored over two chunks, the last of which samples; beside a row that asked for none."""
    plans = Plans(ModelBackend(default_model, num_blocks=8, block_size=16))
    prompt = (504, 3575, 282, 4649, 314, 3287, 30, 1021, 9, 77)
    asks = replace(GREEDY, prompt_logprobs=3, logprobs=2)
    first = plans.run(
        [("a", 0, 4, (1,), False), ("b", 0, 2, (2,), True)],
        admitted=(admit("a", prompt, asks), admit("b", (7, 8))),
    )
    second = plans.run([("b", 2, 1, (), True), ("a", 4, 6, (), True)])
    assert first.logprobs == ()
    assert first.prompt_logprobs[1] == second.prompt_logprobs[0] == ()
    found = first.prompt_logprobs[0] + second.prompt_logprobs[1]
    with torch.inference_mode():
        logprobs = reference.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [p.token for p in found] == list(prompt[1:])
    for at, entry in enumerate(found):
        assert entry.logprob == pytest.approx(logprobs[at, prompt[at + 1]].item(), abs=1e-3)
        best = logprobs[at].topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        rank = int((logprobs[at] > logprobs[at, prompt[at + 1]]).sum()) + 1
        assert entry.rank == pytest.approx(rank, rel=1e-3)  # unlikely tokens crowd within float noise
    ((sampled,),) = second.logprobs[1:]
    assert (sampled.token,) == second.tokens[1]
    assert sampled.rank == 1
    assert len(sampled.top) == 2


# --- duties, on a model of a few lines ------------------------------------------------------------------------------

POISON = 9  # a token whose keys are NaN
TOO_MANY = 100  # tokens in one step that the toy has no memory for


class Toy:
    """Next token = (sum of all tokens so far) mod 10, read from the KV pool so that stale or foreign KV shows."""

    vocab_size = 10
    kv_specs: tuple[KVSpec, ...] = (KVSpec(1, 1, 1),)

    def __init__(self) -> None:
        self.rows_computed = 0

    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        if batch.num_tokens >= TOO_MANY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        values = batch.token_ids.float()[:, None, None]
        pool.write(0, batch.slot_mapping, torch.where(values == POISON, torch.nan, values), values)
        logits = torch.zeros(batch.num_tokens, 10)
        for row in range(batch.num_rows):
            self.rows_computed += 1
            # Whole blocks are read, as attention does: what was never written counts as it is.
            keys = pool.keys[0][batch.block_tables[row]].flatten()
            held = torch.arange(len(keys)) < batch.context_lens[row]
            first, last = batch.row_starts[row : row + 2]
            for at in range(first, last):
                seen = held & (torch.arange(len(keys)) <= batch.positions[at])
                total = (keys * seen).sum()
                logits[at] = torch.nan if total.isnan() else torch.eye(10)[int(total.item()) % 10]
        return logits[batch.logit_rows]


def toy(num_blocks: int = 8) -> tuple[Plans, Toy]:
    model = Toy()
    info = ModelInfo("toy", "Toy", "native", 10, 64, 1, 8, (), "float32", "float32", "cpu", "torch", "none", 0, "", "")
    return Plans(ModelBackend(LoadedModel(model, info), num_blocks, block_size=4)), model


def test_rows_keep_the_plans_order() -> None:
    """The batch puts decodes first; results come back as planned."""
    plans, _ = toy()
    plans.run([("a", 0, 2, (0,), True)], admitted=(admit("a", (1, 1)),))
    result = plans.run(
        [("b", 0, 3, (1,), True), ("a", 2, 1, (), True), ("c", 0, 2, (2,), False)],
        admitted=(admit("b", (1, 2, 3)), admit("c", (1, 2, 3))),
    )
    assert result.tokens == ((6,), (4,), ())
    assert result.failures == ()
    assert result.logprobs == result.prompt_logprobs == ()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    plans, model = toy()
    result = plans.run(
        [("good", 0, 2, (0,), True), ("bad", 0, 3, (1, 2), True)],
        admitted=(admit("good", (1, 2)), admit("bad", (1, POISON, 2))),
    )
    assert result.tokens == ((3,), ())
    assert result.failures == ((1, NOT_FINITE),)
    # A plan made before that was known may still hold the row: it computes nothing.
    before = model.rows_computed
    result = plans.run([("bad", 3, 1, (), True), ("good", 2, 1, (), True)])
    assert result.tokens == ((), (6,))
    assert result.failures == ()
    assert model.rows_computed == before + 1
    # Its blocks go to others, who do not meet its NaN in slots they have not written.
    result = plans.run(
        [("good", 3, 1, (), True), ("next", 0, 1, (1,), True)], admitted=(admit("next", (5,)),), released=("bad",)
    )
    assert result.tokens == ((2,), (5,))
    assert result.failures == ()


def test_prompt_scores_that_are_not_finite_fail_their_row() -> None:
    plans, _ = toy()
    asks = replace(GREEDY, prompt_logprobs=1)
    result = plans.run([("a", 0, 2, (0,), False)], admitted=(admit("a", (1, POISON, 2), asks),))
    assert result.failures == ((0, NOT_FINITE),)
    assert result.prompt_logprobs == ()


def test_a_step_too_large_for_the_memory_takes_its_own_requests_alone() -> None:
    plans, _ = toy(num_blocks=40)
    plans.run([("a", 0, 2, (0,), True)], admitted=(admit("a", (1, 2)),))
    with pytest.raises(OutOfMemory, match="a step of 120 tokens does not fit the memory of cpu") as caught:
        plans.run([("b", 0, 120, tuple(range(1, 31)), True)], admitted=(admit("b", (1,) * 120),))
    assert caught.value.recoverable
    result = plans.run([("a", 2, 1, (), True)], released=("b",))
    assert result.tokens == ((6,),)


def test_shared_blocks_keep_what_they_hold() -> None:
    """Blocks found in the prefix cache are read, fresh ones are zeroed, whatever their former owner left."""
    plans, _ = toy()
    plans.run([("a", 0, 6, (0, 1), True)], admitted=(admit("a", (1, 1, 1, 1, 1, 1)),))
    result = plans.run([("b", 4, 1, (0, 1), True)], admitted=(admit("b", (1, 1, 1, 1, 3), cached=4),), released=("a",))
    assert result.tokens == ((7,),)
    pool = plans.backend.pool
    assert pool.keys[0][1].flatten().tolist() == [3, 0, 0, 0]


def test_rows_of_one_step_share_blocks_it_fills() -> None:
    plans, _ = toy()
    result = plans.run(
        [("a", 0, 5, (0, 1), True), ("b", 4, 1, (0, 2), True)],
        admitted=(admit("a", (1, 1, 1, 1, 1)), admit("b", (1, 1, 1, 1, 2), cached=4)),
    )
    assert result.tokens == ((5,), (6,))


def test_state_lasts_from_admission_to_release() -> None:
    plans, _ = toy(num_blocks=200)
    names = [f"r{i}" for i in range(40)]
    plans.run(
        [(n, 0, 2, (i,), True) for i, n in enumerate(names)],
        admitted=tuple(admit(n, (1, i % 3)) for i, n in enumerate(names)),
    )
    assert plans.backend.num_live == 40
    # Odd ones leave, others come; those that stay still have their tokens and blocks.
    fresh = [f"s{i}" for i in range(30)]
    result = plans.run(
        [(n, 2, 1, (), True) for n in names[::2]] + [(n, 0, 1, (100 + i,), True) for i, n in enumerate(fresh)],
        admitted=tuple(admit(n, (2,)) for n in fresh),
        released=tuple(names[1::2]),
    )
    assert result.tokens == tuple(((1 + i % 3) * 2 % 10,) for i in range(0, 40, 2)) + ((2,),) * 30
    plans.run([], released=(*names[::2], *fresh))
    assert plans.backend.num_live == 0


def test_long_sequences_grow_past_every_buffer() -> None:
    """A prompt of one token decoded across many blocks and reallocations."""
    plans, _ = toy(num_blocks=160)
    total = 1
    result = plans.run([("a", 0, 1, (0,), True)], admitted=(admit("a", (1,)),))
    for start in range(1, 600):  # the answers go round 2, 4, 8, 6
        assert result.tokens == ((total % 10,),), start
        total += total % 10
        result = plans.run([("a", start, 1, (start // 4,) if start % 4 == 0 else (), True)])


def test_near_boundary_and_logprobs_are_handed_on() -> None:
    plans, _ = toy()
    sampling = SamplingParams(temperature=1.0, seed=3, logprobs=1)
    result = plans.run(
        [("a", 0, 1, (0,), True), ("b", 0, 1, (1,), True)], admitted=(admit("a", (1,), sampling), admit("b", (2,)))
    )
    ((entry,), nothing) = result.logprobs
    assert nothing == ()
    assert (entry.token,) == result.tokens[0]
    assert entry.logprob < 0
    assert math.isfinite(entry.logprob)
    assert result.near_boundary == 0
