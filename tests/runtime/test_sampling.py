"""Sampling against its definitions: published known answers, transformers' processors, counted draws, any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec
from paceline.runtime import sampling
from paceline.runtime.kernels.native import unavailable
from paceline.runtime.logprobs import token_logprobs
from paceline.runtime.random import philox4x32, uniforms
from paceline.runtime.sampling import BOUNDARY, SamplerState, distribution, invert, sample


@pytest.fixture(autouse=True, scope="module", params=["torch", "native"])
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs by torch's operations and by the native kernel."""
    if request.param == "native" and (reason := unavailable()) is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampling, "unavailable", lambda: "this test is about torch")
        yield request.param


VOCABULARIES = (49_152, 152_064)


def state(prompt: tuple[int, ...] = (1,), outputs: tuple[int, ...] = (), **params: Any) -> SamplerState:
    return SamplerState(RequestSpec("r", prompt, SamplingParams(**params)), outputs)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


# --- the generator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    def words(text: str) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        return [np.array([int(word, 16)] * 2, dtype=np.uint64) for word in text.split()]

    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    for got, expected in zip(philox4x32((c0, c1, c2, c3), (k0, k1)), words(answer), strict=True):
        assert got.tolist() == expected.tolist()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_uniform_depends_on_its_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert together.tolist() == [uniforms([seed], [position])[0] for seed, position in pairs]
    assert all(0.0 <= u < 1.0 for u in together)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    along_positions = uniforms([7] * 100_000, range(100_000))
    along_seeds = uniforms(range(100_000), [7] * 100_000)
    for draws in (along_positions, along_seeds):
        chi_square(np.bincount((draws * 100).astype(int), minlength=100), np.full(100, 0.01))


# --- filtered distributions ------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]) -> None:
    """Fail when counts deviate from their expectations more than once in about a million times."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    bins = expected > 5
    statistic = float(((counts[bins] - expected[bins]) ** 2 / expected[bins]).sum())
    freedom = int(bins.sum()) - 1
    # Wilson and Hilferty's normal approximation of the chi-square distribution, at five standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def by_definition(logits: Tensor, params: SamplingParams) -> np.ndarray[Any, Any]:
    """The filtered distribution, one step of the definition at a time, in plain Python."""
    scaled = [value / params.temperature for value in logits.tolist()]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k:
        order = order[: params.top_k]
    nucleus: list[int] = []
    mass, total = 0.0, sum(weights[token] for token in order)
    for token in order:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p * max(weights)]
    answer = np.zeros(len(weights))
    answer[kept] = [weights[token] for token in kept]
    return answer / answer.sum()


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_definition(params: dict[str, Any]) -> None:
    logits = random_logits(1, 60, seed=3, scale=1.5)
    expected = by_definition(logits[0], SamplingParams(**params))
    assert distribution(logits, [state(**params)])[0].numpy() == pytest.approx(expected, abs=1e-12)
    rows = [state(seed=seed, **params) for seed in range(20_000)]
    result = sample(logits.expand(len(rows), -1), rows)
    assert not result.failures
    counts = np.bincount(result.tokens, minlength=60)
    if expected.max() < 1.0:
        chi_square(counts, expected)
    else:
        assert counts[expected.argmax()] == len(rows)


def test_draws_along_one_request_follow_the_definition() -> None:
    logits = random_logits(1, 40, seed=4, scale=1.0)
    request = state(seed=11, top_p=0.9)
    tokens = []
    for _ in range(3_000):
        tokens += sample(logits, [request]).tokens
        request.append(tokens[-1])
    chi_square(np.bincount(tokens, minlength=40), by_definition(logits[0], request.params))


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_filters_equal_those_of_transformers(vocab: int, temperature: float) -> None:
    logits = random_logits(1, vocab, seed=vocab)
    history = torch.tensor([[5, 17, 17, 301]])
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        ({}, []),
        ({"top_k": 50}, [TopKLogitsWarper(50)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"top_k": 200, "top_p": 0.8}, [TopKLogitsWarper(200), TopPLogitsWarper(0.8)]),
        ({"top_k": 30, "min_p": 0.02}, [TopKLogitsWarper(30), MinPLogitsWarper(0.02)]),
    ]
    for repetition in (1.0, 1.3):
        for params, processors in cases:
            first = [RepetitionPenaltyLogitsProcessor(repetition)] if repetition != 1.0 else []
            chain = LogitsProcessorList([*first, TemperatureLogitsWarper(temperature), *processors])
            expected = chain(history, logits.double()).softmax(dim=-1)
            request = state((5, 17), (17, 301), temperature=temperature, repetition_penalty=repetition, **params)
            torch.testing.assert_close(distribution(logits, [request]), expected, rtol=1e-9, atol=1e-12)


def test_equal_logits_share_one_fate() -> None:
    logits = row(2.0, 1.0, 2.0, 1.0, 1.0, 0.0)
    support = [
        (distribution(logits, [state(**params)])[0] > 0).tolist()
        for params in ({"top_k": 1}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9})
    ]
    twos, ones = [True, False, True, False, False, False], [True, True, True, True, True, False]
    assert support == [twos, ones, twos, twos]


# --- penalties, logit_bias, min_tokens -------------------------------------------------------------------------------


def test_penalties_follow_openai_and_ctrl() -> None:
    vocab, prompt, outputs = 50, (3, 4, 4, 9), (4, 8, 8, 8, 20)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.8)
    logits = random_logits(1, vocab, seed=6)
    expected = logits[0].double()
    for token in range(vocab):
        if token in prompt + outputs:
            expected[token] = expected[token] / 1.8 if expected[token] > 0 else expected[token] * 1.8
        expected[token] -= outputs.count(token) * -0.4 + float(outputs.count(token) > 0) * 0.7
    request = SamplerState(RequestSpec("r", prompt, params), outputs)
    torch.testing.assert_close(distribution(logits, [request])[0], expected.softmax(0))


def test_penalties_count_as_tokens_come() -> None:
    tokens = tuple(random_tokens(500, 300, seed=1))
    params: dict[str, Any] = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    grown = state(tokens[:100], **params)
    for token in tokens[100:]:
        grown.append(token)
    resumed = state(tokens[:100], tokens[100:], **params)
    assert grown.position == resumed.position == 500
    logits = random_logits(1, 300)
    assert torch.equal(distribution(logits, [grown]), distribution(logits, [resumed]))
    ids, counts = grown.seen()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: tokens[100:].count(t) for t in tokens}


def random_tokens(count: int, vocab: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logit_bias_forces_and_bans(vocab: int) -> None:
    logits = random_logits(1, vocab)
    best = int(logits.argmax())
    bias = ((vocab - 1, 100.0), (best, -100.0))
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}]
    for params in kinds:
        assert sample(logits, [state(logit_bias=bias, **params)]).tokens == [vocab - 1]
        assert sample(logits, [state(logit_bias=bias[1:], **params)]).tokens != [best]


def test_logit_bias_comes_before_the_temperature() -> None:
    logits = random_logits(1, 20)
    expected = logits[0].double()
    expected[4] += 1.5
    request = state(temperature=0.5, logit_bias=((4, 1.5),))
    torch.testing.assert_close(distribution(logits, [request])[0], (expected / 0.5).softmax(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_the_stop_tokens_until_it_is_reached(temperature: float) -> None:
    logits = row(0.0, 50.0, 40.0, 1.0)
    request = state(temperature=temperature, min_tokens=2, stop_token_ids=(1, 2))
    tokens = []
    for _ in range(4):
        tokens += sample(logits, [request]).tokens
        request.append(tokens[-1])
    assert not {1, 2} & set(tokens[:2])
    assert tokens[2:] == [1, 1]


# --- the same row in any batch ---------------------------------------------------------------------------------------

params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
    top_k=st.sampled_from([0, 0, 1, 5, 10_000]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.8]),
    logit_bias=st.sampled_from([(), (), ((3, 4.0), (90, -100.0))]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (2,), (2, 7)]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
requests = st.builds(
    lambda params, prompt, outputs: (RequestSpec("r", tuple(prompt), params), tuple(outputs)),
    params_of_any_kind,
    st.lists(st.integers(0, 96), min_size=1, max_size=8),
    st.lists(st.integers(0, 96), max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests, min_size=1, max_size=12), st.integers(0, 1000), st.sampled_from([0.1, 3.0, 30.0]))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(
    batch: list[tuple[RequestSpec, tuple[int, ...]]], seed: int, scale: float
) -> None:
    logits = random_logits(len(batch), 97, seed, scale)
    states = [SamplerState(spec, outputs) for spec, outputs in batch]
    together = sample(logits, states)
    assert not together.failures
    alone = [sample(logits[i : i + 1], [request]) for i, request in enumerate(states)]
    assert together.tokens == [result.tokens[0] for result in alone]
    assert together.near_boundary == sum(result.near_boundary for result in alone)
    for i, request in enumerate(states):
        if request.params.logprobs is not None:
            assert together.logprobs[i] == alone[i].logprobs[0]
    backwards = sample(logits.flip(0), states[::-1])
    assert backwards.tokens == together.tokens[::-1]


def test_a_preempted_request_goes_on_with_the_same_tokens() -> None:
    spec = RequestSpec("r", (1, 2, 3), SamplingParams(seed=5, top_p=0.9, presence_penalty=0.5))
    logits = random_logits(30, 200)
    straight, tokens = SamplerState(spec), []
    for step in range(30):
        tokens += sample(logits[step : step + 1], [straight]).tokens
        straight.append(tokens[-1])
    for cut in (0, 1, 17, 29):
        resumed = SamplerState(spec, tokens[:cut])
        assert sample(logits[cut : cut + 1], [resumed]).tokens == [tokens[cut]]


def test_noise_turns_a_draw_only_where_it_is_counted() -> None:
    """Logits disturbed as by another kernel or batch size: every token that changes was counted, and few are."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 100, "top_p": 0.9}]
    count = 10_000
    logits = random_logits(count, 500, scale=2.0)
    noise = torch.linspace(-9e-6, 9e-6, 500)  # the worst kind: random signs would cancel in the cumulated sum
    changed = near = 0
    for kind in kinds:
        states = [state(seed=seed, **kind) for seed in range(count)]
        before, after = sample(logits, states), sample(logits + noise, states)
        near += before.near_boundary
        for i in range(count):
            if before.tokens[i] != after.tokens[i]:
                changed += 1
                assert sample(logits[i : i + 1], [states[i]]).near_boundary == 1
    assert 5 < changed < near < 0.02 * count * len(kinds)


def test_draws_at_a_boundary_are_counted_and_no_others() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)

    def at(u: float, doubtful: float = 0.0) -> tuple[int, bool]:
        token, near = invert(weights, torch.tensor([u], dtype=torch.float64), nothing + doubtful)
        return int(token), bool(near)

    assert at(0.0) == (1, False)  # nothing below the first token to turn into
    assert at(0.25 - 2e-5) == (1, False)
    assert at(0.25 - 5e-6) == (1, True)
    assert at(0.25) == (3, True)
    assert at(0.25 + 2e-5) == (3, False)
    assert at(0.75 - 2e-5, doubtful=0.001) == (3, True)
    assert at(1.0 - 2.0**-53) == (4, False)
    assert at(1.0 - 2.0**-53, doubtful=0.001) == (4, True)


@pytest.mark.parametrize(
    ("logits", "params", "near"),
    [
        (row(1.0, 1.0 - BOUNDARY / 2, 0.0, 0.0), {"top_k": 1}, True),  # the two could change places
        (row(1.0, 1.0 - BOUNDARY * 3, 0.0, 0.0), {"top_k": 1}, False),
        (row(1.0, 1.0, 0.0, 0.0), {"top_p": 0.0}, True),
        (row(math.log(0.5), math.log(0.25), math.log(0.25)), {"top_p": 0.5}, True),  # a second token may be needed
        (row(math.log(0.5), math.log(0.25), math.log(0.25)), {"top_p": 0.4}, False),
        (row(0.0, math.log(0.1) + 2e-6), {"min_p": 0.1}, True),
        (row(0.0, math.log(0.1) + 2e-4), {"min_p": 0.01}, False),
        (row(3.0, 1.0), {"top_p": 0.0}, False),  # the best token always stays
        (row(3.0, 1.0), {"min_p": 1.0}, False),
    ],
)
def test_membership_in_doubt_is_counted(logits: Tensor, params: dict[str, Any], near: bool) -> None:
    # A draw low in the first token's interval, within any weight in doubt of its edge, but not within BOUNDARY.
    seed = next(seed for seed in range(10_000) if 1e-3 < uniforms([seed], [1])[0] < 1e-2)
    assert sample(logits, [state(seed=seed, **params)]).near_boundary == int(near)


def test_a_token_of_weight_zero_never_comes_out() -> None:
    """Parallel prefix sums round differently at each position; a sum may rise by an ulp over a weight of 0."""
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0, 0.0]], dtype=torch.float64)

    class Creeping(torch.Tensor):
        """A tensor whose prefix sums creep up at every position."""

        def cumsum(self, *args: Any, **kwargs: Any) -> Any:
            plain = self.as_subclass(torch.Tensor).cumsum(*args, **kwargs)
            return plain + torch.arange(1, plain.shape[1] + 1) * 1e-9

    creeping = weights.as_subclass(Creeping)
    for u in (0.0, 1e-10, 0.3, 0.3 + 2e-9, 1.0 - 1e-9, 1.0 - 2.0**-53):
        token, _ = invert(creeping, torch.tensor([u], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        assert weights[0, int(token)] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_draws_the_same_tokens() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((5, 2.0),), "logprobs": 3},
    ]
    rows = [state((5, 9), (9, 11), seed=seed, **kinds[seed % len(kinds)]) for seed in range(600)]
    logits = random_logits(len(rows), 32_000, scale=4.0)
    here, there = sample(logits, rows), sample(logits.cuda(), rows)
    turned = sum(a != b for a, b in zip(here.tokens, there.tokens, strict=True))
    assert turned <= here.near_boundary
    assert turned < 3
    assert [len(answer) for answer in there.logprobs] == [len(answer) for answer in here.logprobs]


# --- extremes and failures -------------------------------------------------------------------------------------------

EVERY_KIND: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1e-300},
    {"top_k": 3},
    {"top_p": 0.3},
    {"min_p": 0.3},
    {"logprobs": 2},
]


@pytest.mark.parametrize("vocab", [3, *VOCABULARIES])
def test_one_possible_token_is_the_token(vocab: int) -> None:
    logits = torch.full((len(EVERY_KIND), vocab), -torch.inf)
    logits[:, vocab - 2] = -1e30
    result = sample(logits, [state(**params) for params in EVERY_KIND])
    assert result.tokens == [vocab - 2] * len(EVERY_KIND)
    assert result.near_boundary == 0
    assert not result.failures


def test_tiny_temperature_is_greedy_and_huge_is_uniform() -> None:
    logits = random_logits(2000, 50, scale=10.0)
    cold = sample(logits, [state(temperature=1e-300, seed=seed) for seed in range(2000)])
    assert cold.tokens == logits.argmax(dim=-1).tolist()
    hot = sample(logits, [state(temperature=1e9, seed=seed) for seed in range(2000)])
    chi_square(np.bincount(hot.tokens, minlength=50), np.full(50, 0.02))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = row(0.0, 5.0, 5.0, 5.0)
    assert sample(logits, [state(temperature=0.0)]).tokens == [1]
    assert sample(logits, [state(temperature=0.0, logprobs=2)]).tokens == [1]
    assert sample(logits, [state(temperature=0.0, logit_bias=((0, 5.0), (1, -1.0)))]).tokens == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", EVERY_KIND, ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3, 50)
    expected = sample(logits, [state(**params) for _ in range(3)])
    logits[1, 7] = bad
    result = sample(logits, [state(**params) for _ in range(3)])
    assert [index for index, _ in result.failures] == [1]
    assert [result.tokens[i] for i in (0, 2)] == [expected.tokens[i] for i in (0, 2)]


def test_a_row_that_allows_nothing_fails_alone() -> None:
    nothing = torch.full((1, 4), -torch.inf)
    one = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    masked = state(min_tokens=1, stop_token_ids=(1,), logprobs=1)
    result = sample(torch.cat([nothing, one, one]), [state(), masked, state(logprobs=0)])
    assert [index for index, _ in result.failures] == [0, 1]
    assert result.failures[1][1] == "every token is masked out"
    assert result.tokens[2] == 1
    assert [len(answer) for answer in result.logprobs] == [0, 0, 1]


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(len(EVERY_KIND), 100)
    kept = logits.clone()
    sample(logits, [state(presence_penalty=1.0, logit_bias=((1, 3.0),), **params) for params in EVERY_KIND])
    assert torch.equal(logits, kept)


def test_a_large_batch_is_worked_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(20, 100)
    rows = [state(seed=seed, top_p=0.9, logprobs=1) for seed in range(20)]
    whole = sample(logits, rows)
    monkeypatch.setattr("paceline.runtime.logprobs._CPU_CHUNK", 350)
    assert sample(logits, rows) == whole


# --- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_logprobs_are_of_the_raw_distribution(vocab: int) -> None:
    logits = random_logits(3, vocab)
    rows = [
        state(temperature=0.3, top_k=5, logprobs=4, logit_bias=((9, 100.0),)),
        state(temperature=0.0, logprobs=0),
        state(temperature=1.0),
    ]
    result = sample(logits, rows)
    expected = logits.double().log_softmax(dim=-1)
    assert [len(answer) for answer in result.logprobs] == [1, 1, 0]
    (first,), (second,) = result.logprobs[:2]
    assert first.token == result.tokens[0] == 9
    assert first.logprob == pytest.approx(float(expected[0, 9]), abs=1e-5)
    assert first.rank == int((logits[0] > logits[0, 9]).sum()) + 1
    top = expected[0].topk(4)
    assert [token for token, _ in first.top] == top.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert (second.token, second.rank, second.top) == (int(logits[1].argmax()), 1, ())


def test_equal_logits_rank_by_id() -> None:
    logits = row(-0.0, 2.0, 0.0, 2.0, -1.0, -torch.inf)
    answers = token_logprobs(logits.expand(6, -1), range(6), [6] * 6)
    assert [answer.rank for answer in answers] == [3, 1, 4, 2, 5, 6]
    assert [token for token, _ in answers[0].top] == [1, 3, 0, 2, 4, 5]
    assert answers[5].logprob == -math.inf


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    (answer,) = token_logprobs(row(1.0, 2.0), [0], [5])
    assert [token for token, _ in answer.top] == [1, 0]


def test_prompt_logprobs_ask_each_row_about_the_next_token() -> None:
    prompt = random_tokens(40, 300, seed=2)
    logits = random_logits(39, 300)
    answers = token_logprobs(logits, prompt[1:], [2] * 39)
    expected = logits.double().log_softmax(dim=-1)
    for i, answer in enumerate(answers):
        assert answer.token == prompt[i + 1]
        assert answer.logprob == pytest.approx(float(expected[i, answer.token]), abs=1e-5)
        assert answer.rank == int((logits[i] > logits[i, answer.token]).sum()) + 1
    assert token_logprobs(logits[:0], [], []) == []


def test_a_seed_is_taken_modulo_64_bits() -> None:
    logits = random_logits(1, 1000)
    request = state(seed=2**64 - 3)
    negative = SamplerState(RequestSpec("r", (1,), replace(request.params, seed=-3)))
    assert sample(logits, [request]).tokens == sample(logits, [negative]).tokens
