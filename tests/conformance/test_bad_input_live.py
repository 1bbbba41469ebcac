"""The bad inputs that the project promises to answer well, one by one, as the openai client sees them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.conformance.conftest import LiveServer

CHAT: dict[str, dict[str, Any]] = {
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "wrong type": {"messages": "hello"},
    "no messages": {"messages": []},
    "negative max_tokens": {"max_tokens": -1},
    "huge max_tokens": {"max_tokens": 10**9},
    "temperature out of range": {"temperature": 3},
    "too many stop strings": {"stop": ["a"] * 17},
    "biased id outside the vocabulary": {"logit_bias": {"999999": 1}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "chat template": {"extra_body": {"chat_template": "{{ 1 }}"}},
    "n": {"n": 1000},
    "logprobs": {"logprobs": True, "top_logprobs": 100},
}


@pytest.mark.parametrize("name", CHAT)
def test_chat(client: openai.OpenAI, model: str, name: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], **CHAT[name]}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, stream=stream, **body)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param
        assert caught.value.request_id


@pytest.mark.parametrize("prompt", ["", [], [[]], [49152], [-1], [[1], [10**15]]])
def test_prompts(client: openai.OpenAI, model: str, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=prompt)
    assert caught.value.param == "prompt"


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-6", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-6")


def test_prompt_over_the_context_says_both_numbers(client: openai.OpenAI, server: LiveServer, model: str) -> None:
    longest = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["max_model_len"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[88] * (longest + 5))
    assert str(longest) in caught.value.message
    assert str(longest + 5) in caught.value.message
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("content", [b"{", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[]", b""])
def test_malformed_json_and_utf8(server: LiveServer, content: bytes) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=30
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_body_over_the_limit(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * (9 << 20)}, timeout=30)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
