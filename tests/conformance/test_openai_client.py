"""The openai client against the live server: both endpoints, whole and streamed, and what users rely on."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.conformance.conftest import LiveServer

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


def test_models(client: openai.OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_chat_whole_and_streamed_agree(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    finished = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finished[-1] == whole.choices[0].finish_reason
    assert set(finished[:-1]) == {None}
    usage, streamed_usage = whole.usage, chunks[-1].usage
    assert usage is not None
    assert streamed_usage is not None
    assert streamed_usage.prompt_tokens == usage.prompt_tokens
    assert streamed_usage.completion_tokens == usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, **GREEDY) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert "Paris" in (final.choices[0].message.content or "")


def test_completion_whole_and_streamed_agree(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="The capital of France is", **GREEDY)
    chunks = list(client.completions.create(model=model, prompt="The capital of France is", stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert "Paris" in whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_prompts_as_text_ids_and_batches(client: openai.OpenAI, server: LiveServer, model: str) -> None:
    import httpx

    prompts = ["The capital of France is", "One, two, three,"]
    ids = [
        httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}, timeout=30).json()["tokens"] for prompt in prompts
    ]
    single = [client.completions.create(model=model, prompt=p, **GREEDY).choices[0].text for p in prompts]
    shapes: list[Any] = [prompts, ids]
    for batch in shapes:
        answer = client.completions.create(model=model, prompt=batch, **GREEDY)
        assert [choice.text for choice in answer.choices] == single
        assert [choice.index for choice in answer.choices] == [0, 1]
    assert client.completions.create(model=model, prompt=ids[0], **GREEDY).choices[0].text == single[0]


def test_usage_reports_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count with me: " + "one two three " * 20}]
    for expected in (0, 16):
        usage = client.chat.completions.create(model=model, messages=long, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= expected


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=5, temperature=0, max_tokens=6
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert bytes(b for entry in content for b in entry.bytes or []).decode() == choice.message.content
    for entry in content:
        assert entry.logprob <= 0
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token  # greedy takes the most likely


def test_completion_echo_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(model=model, prompt=prompt, echo=True, logprobs=2, temperature=0, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text.startswith(prompt)
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    # What follows a prompt is as likely whether it was given or generated.
    whole = answer.choices[0].text
    again = client.completions.create(model=model, prompt=whole, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert again.text == whole
    assert again.logprobs is not None
    assert again.logprobs.token_logprobs is not None
    assert again.logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-3)


def test_n_choices_and_seeds(client: openai.OpenAI, model: str) -> None:
    def ask(n: int, seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, n=n, seed=seed, temperature=1.5, max_tokens=12
        )
        return [choice.message.content for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = ask(3, 1)
    assert len(set(first)) > 1
    assert ask(3, 1) == first
    assert ask(1, 1) == first[:1]
    assert ask(3, 2) != first


def test_stop_strings(client: openai.OpenAI, model: str) -> None:
    plain = client.completions.create(model=model, prompt="One, two, three,", temperature=0, max_tokens=24).choices[0]
    stop = plain.text[7:12]
    for stream in (False, True):
        text, reason = "", ""
        if stream:
            for chunk in client.completions.create(
                model=model, prompt="One, two, three,", stop=[stop], stream=True, temperature=0, max_tokens=24
            ):
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
        else:
            answer = client.completions.create(
                model=model, prompt="One, two, three,", stop=stop, temperature=0, max_tokens=24
            )
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert text == plain.text[: plain.text.index(stop)]
        assert reason == "stop"


def test_logit_bias_and_min_tokens(client: openai.OpenAI, model: str) -> None:
    forced = client.chat.completions.create(
        model=model, messages=MESSAGES, logit_bias={"88": 100}, temperature=0, max_tokens=3
    )
    assert forced.choices[0].message.content == "hhh"
    never_ending = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=30,
        logit_bias={"2": 100},  # the end, at once
        extra_body={"min_tokens": 4},
    )
    assert never_ending.usage is not None
    assert never_ending.usage.completion_tokens == 5


def test_request_ids(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[], extra_headers={"X-Request-Id": "mine-2"})
    assert caught.value.request_id == "mine-2"


def test_timeout_frees_the_blocks(client: openai.OpenAI, server: LiveServer, model: str) -> None:
    impatient = client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=1500, extra_body={"ignore_eos": True}
        )
    server.until_idle()


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_aborts(client: openai.OpenAI, server: LiveServer, model: str, n: int) -> None:
    before = server.metric("paceline:requests_aborted_total")
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, n=n, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.until_idle()
    assert server.metric("paceline:requests_aborted_total") == before + n


def test_64_streams_at_once(server: LiveServer, model: str) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, str | None, int]:
        text, reason, chunks = "", None, 0
        stream = await client.completions.create(
            model=model, prompt=f"Number {i}:", stream=True, temperature=0, max_tokens=8
        )
        async for chunk in stream:
            chunks += 1
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason, chunks

    async def all_of_them() -> list[tuple[str, str | None, int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=150) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    answers = asyncio.run(all_of_them())
    assert all(reason in ("stop", "length") for _, reason, _ in answers)
    assert all(text for text, _, _ in answers)

    # Together or alone, the answer is the same.
    async def alone(i: int) -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
            return (await one(client, i))[0]

    for i in (0, 31, 63):
        assert asyncio.run(alone(i)) == answers[i][0]
    server.until_idle()
