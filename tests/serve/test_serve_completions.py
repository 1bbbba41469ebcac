"""The completions endpoint: four shapes of prompts, echo, log-probabilities, batches."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from tests.serve.live import Live

PATH = "/v1/completions"


def test_whole_answer_has_openais_shape(live: Live) -> None:
    body = live.complete().json()
    answer = Completion.model_validate(body)
    assert answer.choices[0].text == " one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert live.engine.backend.seen[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "count"), [("hi", 1), (["hi", "there"], 2), ([88, 2756], 1), ([[88, 2756], [31394]], 2)]
)
def test_all_shapes_of_prompts(live: Live, prompt: Any, count: int) -> None:
    body = live.complete(prompt, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    by_id = sorted(live.engine.backend.seen, key=lambda spec: int(spec.request_id.rsplit("-", 1)[1]))
    prompts = [spec.prompt for spec in by_id]
    assert prompts[0] == prompts[1]
    assert body["usage"]["prompt_tokens"] == sum(len(p) for p in prompts[::2])
    if isinstance(prompt[0], int):
        assert prompts[0] == tuple(prompt)


def test_streamed_batch(live: Live) -> None:
    events = live.stream(PATH, {"prompt": ["a", "b"], "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == 8
    texts = {0: "", 1: ""}
    reasons = {}
    for event in events:
        Completion.model_validate({**event, "choices": [{**c, "finish_reason": "stop"} for c in event["choices"]]})
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: " one two three", 1: " one two three"}
    assert reasons == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(live: Live, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "Hello 你好", "echo": True, "logprobs": 2}
    if stream:
        choices = [c for event in live.stream(PATH, fields)[:-1] for c in event["choices"]]
    else:
        choices = live.post(PATH, fields).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == "Hello 你好 one two three"
    tokens = [t for c in choices for t in c["logprobs"]["tokens"]]
    offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
    values = [v for c in choices for v in c["logprobs"]["token_logprobs"]]
    tops = [v for c in choices for v in c["logprobs"]["top_logprobs"]]
    prompt = live.tokenizer.encode("Hello 你好")
    assert len(tokens) == len(offsets) == len(values) == len(tops) == len(prompt) + 3
    assert values[0] is None
    assert all(value == -0.25 for value in values[1:])
    assert all(len(top) == 2 for top in tops[1:])
    assert offsets == sorted(offsets)
    assert [text[o:][: len(t)] for t, o in zip(tokens[-3:], offsets[-3:], strict=True)] == [" one", " two", " three"]


def test_scoring_a_prompt_alone(live: Live) -> None:
    body = live.complete("Hello there", echo=True, logprobs=0, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == "Hello there"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


def test_echo_of_ids(live: Live) -> None:
    ids = live.tokenizer.encode("Hello there")
    assert live.complete(ids, echo=True).json()["choices"][0]["text"] == "Hello there one two three"


def test_logprobs_name_the_chosen_token_always(live: Live) -> None:
    lists = live.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{" one": -0.25}, {" two": -0.25}, {" three": -0.25}]


def test_best_of(live: Live) -> None:
    assert live.complete(best_of=1).status_code == 200
    assert live.complete(best_of=2, n=2).status_code == 200
    assert live.complete(best_of=3).status_code == 400


def test_one_refused_prompt_runs_none(live: Live) -> None:
    response = live.complete(["fine", [49152]])
    assert response.status_code == 400
    assert live.engine.backend.seen == []
