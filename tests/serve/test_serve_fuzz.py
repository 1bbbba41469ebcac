"""Whatever a body holds, the border answers with jobs or with a BadRequest that names a field; never with a crash."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from paceline.errors import BadRequest
from paceline.serve.exchange import describe_error, encode_json
from paceline.serve.fields import CHAT_OFF, COMPLETION_OFF, check_fields
from paceline.serve.keys import ANONYMOUS
from paceline.serve.prepare import Job, Model, Preparer, choice_seed
from paceline.serve.schemas import ChatRequest, CompletionRequest, field_names, parse_body
from paceline.serve.settings import ServeSettings
from paceline.serve.traffic import Traffic
from paceline.text.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine

scalars = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
FIELDS = sorted(field_names(ChatRequest) | field_names(CompletionRequest) | set(CHAT_OFF) | set(COMPLETION_OFF))
# Values near what is allowed, so that many bodies get far.
near = st.integers(-2, 300) | st.floats(-3, 3) | st.booleans() | st.lists(st.integers(-1, 50000), max_size=3)
fields = st.dictionaries(st.sampled_from(FIELDS), values | near, max_size=3)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=9)}),
    min_size=1,
    max_size=3,
)


def prepare(tokenizer: Tokenizer, kind: Any, body: dict[str, Any]) -> list[Job]:
    engine = FakeEngine()
    model = Model(engine._info, tokenizer, ("m",), 0)
    parsed = parse_body(kind, body)
    off = CHAT_OFF if kind is ChatRequest else COMPLETION_OFF
    check_fields(body, field_names(kind), off, strict=False)
    preparer = Preparer(model, ServeSettings(), ANONYMOUS)
    method = preparer.chat if kind is ChatRequest else preparer.completion
    return asyncio.run(method(parsed, "id", Traffic()))


def check(tokenizer: Tokenizer, kind: Any, body: dict[str, Any]) -> None:
    refusal: BadRequest | None = None
    jobs: list[Job] = []
    try:
        jobs = prepare(tokenizer, kind, body)
    except BadRequest as error:
        refusal = error
    event("refused" if refusal else "taken")
    if refusal is not None:
        status, shape, _ = describe_error(refusal)
        assert status == 400
        assert refusal.param
        assert len(encode_json(shape)) < 2000
        return
    assert 1 <= len(jobs) <= 1024
    assert [job.index for job in jobs] == list(range(len(jobs)))
    for job in jobs:
        sampling = job.spec.sampling
        assert 1 <= sampling.max_tokens <= 2048 - len(job.spec.prompt)
        assert sampling.min_tokens <= sampling.max_tokens
        assert 0 <= sampling.seed < 1 << 64
        assert 0 <= sampling.temperature <= 2
        assert all(0 <= token < 49152 for token in (*job.spec.prompt, *sampling.stop_token_ids))


@given(body=fields, chat=messages)
@settings(max_examples=150, deadline=None)
def test_any_chat(default_tokenizer: Tokenizer, body: dict[str, Any], chat: list[dict[str, Any]]) -> None:
    check(default_tokenizer, ChatRequest, {"messages": chat, **body})


@given(body=fields, prompt=st.text(max_size=9) | st.lists(st.integers(0, 49151), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_completion(default_tokenizer: Tokenizer, body: dict[str, Any], prompt: Any) -> None:
    check(default_tokenizer, CompletionRequest, {"prompt": prompt, **body})


@given(seed=st.integers(0, (1 << 64) - 1))
@settings(max_examples=100, deadline=None)
def test_choices_have_different_seeds(seed: int) -> None:
    seeds = [choice_seed(seed, choice) for choice in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    neighbours = {choice_seed((seed + 1) % (1 << 64), choice) for choice in range(1, 128)}
    assert not neighbours & set(seeds[1:])
