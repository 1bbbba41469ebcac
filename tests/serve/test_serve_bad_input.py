"""Every kind of bad input has an OpenAI-shaped error, the right status and the field at fault."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.shared import ErrorObject

from paceline.core.step import Rejected, RejectReason
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, live_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def error_of(response: Any) -> ErrorObject:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return ErrorObject.model_validate(response.json()["error"])


BAD_CHAT: dict[str, tuple[dict[str, Any], str | None]] = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages of a wrong type": ({"messages": "hi"}, "messages"),
    "a message of a wrong type": ({"messages": ["hi"]}, "messages.0"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0.role"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
    ),
    "a call with broken arguments": (
        {
            "messages": [
                *USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages.1.tool_calls.0.function.arguments",
    ),
    "a call with arguments nested deeply": (
        {
            "messages": [
                *USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
            ]
        },
        "messages.1.tool_calls.0.function.arguments",
    ),
    "top_logprobs without logprobs": ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    "too many top_logprobs": ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "logprobs of a wrong type": ({"messages": USER, "logprobs": 5}, "logprobs"),
    "tools": ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "functions": ({"messages": USER, "functions": [{"name": "f"}]}, "functions"),
    "json schema": ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
    "json mode": ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    "audio": ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
    "modalities": ({"messages": USER, "modalities": ["text", "audio"]}, "modalities"),
    "reasoning_effort": ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
    "web search": ({"messages": USER, "web_search_options": {}}, "web_search_options"),
    "chat template": ({"messages": USER, "chat_template": "{{ 7 * 7 }}"}, "chat_template"),
    "template variables that are ours": (
        {"messages": USER, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
    ),
    "both ends": (
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    "max_completion_tokens": ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    "unknown tier": ({"messages": USER, "service_tier": "gold"}, "service_tier"),
    "unknown class": ({"messages": USER, "paceline": {"class": "gold"}}, "paceline.class"),
}

BAD_TEXT: dict[str, tuple[dict[str, Any], str | None]] = {
    "no prompt": ({}, "prompt"),
    "null prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "list with an empty prompt": ({"prompt": ["a", ""]}, "prompt"),
    "list with an empty list": ({"prompt": [[1], []]}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt"),
    "prompt of a wrong type": ({"prompt": 5}, "prompt"),
    "booleans are no ids": ({"prompt": [True]}, "prompt"),
    "id outside the vocabulary": ({"prompt": [49152]}, "prompt"),
    "negative id": ({"prompt": [[-1]]}, "prompt"),
    "huge id": ({"prompt": [10**30]}, "prompt"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    "no max_tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "huge max_tokens": ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
    "max_tokens beyond printing": ({"prompt": "a", "max_tokens": 10**4300 - 1}, "max_tokens"),
    "min_tokens beyond printing": ({"prompt": "a", "min_tokens": 10**4300 - 1}, "min_tokens"),
    "max_tokens as text": ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    "max_tokens as fraction": ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    "min over max": ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    "negative temperature": ({"prompt": "a", "temperature": -0.1}, "temperature"),
    "high temperature": ({"prompt": "a", "temperature": 2.1}, "temperature"),
    "temperature as text": ({"prompt": "a", "temperature": "hot"}, "temperature"),
    "top_p": ({"prompt": "a", "top_p": 1.1}, "top_p"),
    "top_k": ({"prompt": "a", "top_k": -2}, "top_k"),
    "min_p": ({"prompt": "a", "min_p": 2}, "min_p"),
    "presence": ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    "frequency": ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    "repetition": ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    "repetition that is 0 in float32": ({"prompt": "a", "repetition_penalty": 5e-324}, "repetition_penalty"),
    "no choices": ({"prompt": "a", "n": 0}, "n"),
    "too many choices": ({"prompt": "a", "n": 129}, "n"),
    "too many sequences": ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
    "n as boolean": ({"prompt": "a", "n": True}, "n"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    "empty stop": ({"prompt": "a", "stop": ["x", ""]}, "stop"),
    "long stop": ({"prompt": "a", "stop": "x" * 257}, "stop"),
    "stop of a wrong type": ({"prompt": "a", "stop": 5}, "stop"),
    "bias keys": ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "a bias key with a space": ({"prompt": "a", "logit_bias": {" 5": 1}}, "logit_bias"),
    "bias as text": ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias"),
    "bias of an unknown token": ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias"),
    "bias too strong": ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    "too many biases": ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    "stop id outside": ({"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids"),
    "seed over 64 bits": ({"prompt": "a", "seed": 1 << 64}, "seed"),
    "too many logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "negative logprobs": ({"prompt": "a", "logprobs": -1}, "logprobs"),
    "best_of": ({"prompt": "a", "best_of": 2}, "best_of"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "embeddings": ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
    "beam search": ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    "stream options alone": ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    "stream as text": ({"prompt": "a", "stream": "yes"}, "stream"),
    "store": ({"prompt": "a", "store": True}, "store"),
}


@pytest.mark.parametrize("name", BAD_CHAT)
def test_bad_chat(live: Live, name: str) -> None:
    body, param = BAD_CHAT[name]
    check_refused(live, CHAT, body, param)


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_completion(live: Live, name: str) -> None:
    body, param = BAD_TEXT[name]
    check_refused(live, TEXT, body, param)


def check_refused(live: Live, path: str, body: dict[str, Any], param: str | None) -> None:
    # The same error streamed: it comes before the stream begins.
    for extra in ({},) if "stream" in body or "stream_options" in body else ({}, {"stream": True}):
        response = live.post(path, {**body, **extra})
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error.type == "invalid_request_error"
        assert error.param == param, error.message
        assert len(error.message) < 400
    assert live.engine.backend.seen == []


RAW: dict[str, tuple[bytes, int]] = {
    "malformed": (b'{"prompt": ', 400),
    "empty": (b"", 400),
    "not an object": (b"[1]", 400),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400),
    "nested deeply": (b"[" * 100_000, 400),
    "endless number": (b'{"seed": ' + b"9" * 5000 + b"}", 400),
}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", RAW)
def test_raw_bodies(live: Live, path: str, name: str) -> None:
    content, status = RAW[name]
    response = live.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status
    error_of(response)


def test_infinity_by_size(live: Live) -> None:
    response = live.client.post(TEXT, content=b'{"prompt": "a", "temperature": 1e999}')
    assert response.status_code == 400
    assert error_of(response).param == "temperature"


def test_content_type_must_be_json(live: Live) -> None:
    # What a web page may send to localhost unasked.
    response = live.client.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
    error_of(response)
    with_charset = {"content-type": "application/json; charset=utf-8"}
    assert live.client.post(TEXT, content=b'{"prompt": "a"}', headers=with_charset).status_code == 200


def test_unknown_model_and_path_and_method(live: Live) -> None:
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        response = live.post(path, {**body, "model": "gpt-6"})
        assert response.status_code == 404
        error = error_of(response)
        assert (error.code, error.param) == ("model_not_found", "model")
        assert "tiny-test" in error.message
    assert error_of(live.get("/v1/models/none")).code == "model_not_found"
    response = live.get("/v1/nothing")
    assert response.status_code == 404
    error_of(response)
    response = live.get(CHAT)
    assert response.status_code == 405
    error_of(response)
    assert live.post("/v1/models/", {}).status_code in (404, 405)


def test_prompt_longer_than_the_context_says_both_numbers(live: Live) -> None:
    response = live.complete([88] * 3000)
    assert response.status_code == 400
    error = error_of(response)
    assert "3000" in error.message
    assert "2048" in error.message
    assert error.code == "context_length_exceeded"
    response = live.complete([88] * 2048)
    assert error_of(response).code == "context_length_exceeded"
    assert live.complete([88] * 2047).status_code == 200
    response = live.complete([88] * 2000, max_tokens=100)
    error = error_of(response)
    assert error.param == "max_tokens"
    assert "2000" in error.message
    assert "2100" in error.message
    assert "2048" in error.message
    response = live.chat("word " * 4000)
    assert error_of(response).code == "context_length_exceeded"
    # So long that it need not be tokenised to know.
    response = live.complete("x" * 4_000_000)
    assert error_of(response).code == "context_length_exceeded"


def test_body_over_the_limit(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(max_body_bytes=1000)) as live:
        live.says(" ok")
        big = b'{"prompt": "' + b"x" * 2000 + b'"}'
        response = live.client.post(TEXT, content=big, headers={"content-type": "application/json"})
        assert response.status_code == 413
        error_of(response)

        def chunks() -> Any:
            yield from (big[i : i + 100] for i in range(0, len(big), 100))

        response = live.client.post(TEXT, content=chunks(), headers={"content-type": "application/json"})
        assert response.status_code == 413
        error_of(response)
        assert live.complete("x" * 900).status_code == 200


def test_unknown_fields_are_ignored_or_refused(live: Live, default_tokenizer: Tokenizer) -> None:
    assert live.complete(frobnicate=1).status_code == 200
    assert live.chat(user="me", metadata={"a": "b"}, parallel_tool_calls=True).status_code == 200
    with live_server(default_tokenizer, ServeSettings(strict_fields=True)) as strict:
        response = strict.complete(frobnicate=1)
        assert response.status_code == 400
        assert error_of(response).param == "frobnicate"
        assert strict.complete(user="me").status_code == 200


OFF: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "store": False,
    "priority": 0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "functions": None,
    "verbosity": "medium",
    "n": None,
    "stop": None,
    "temperature": None,
    "logit_bias": None,
    "stream": False,
    "seed": None,
    "max_tokens": None,
}


@pytest.mark.parametrize("name", OFF)
def test_values_that_mean_off_are_fine(live: Live, name: str) -> None:
    assert live.chat(**{name: OFF[name]}).status_code == 200


def test_overload_is_429_with_retry_after(live: Live) -> None:
    live.engine.reject = Rejected("", RejectReason.QUEUE_FULL, "9 requests are waiting already", retry_after_s=2.5)
    for extra in ({}, {"stream": True}):
        response = live.post(TEXT, {"prompt": "a", **extra})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert error_of(response).code == "queue_full"


def test_one_rejected_choice_cancels_the_others(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, max_waiting=1) as live:
        live.says(" ok")
        live.engine.paused = True
        assert live.complete(n=3).status_code == 429
        live.engine.paused = False
        live.until_idle()


def test_tokenize_and_detokenize_refusals(live: Live) -> None:
    bodies: list[dict[str, Any]] = [{}, {"prompt": "a", "messages": USER}, {"prompt": 5}]
    for body in bodies:
        assert live.post("/tokenize", body).status_code == 400
    bodies = [{}, {"tokens": [49152]}, {"tokens": "a"}, {"tokens": [-1]}]
    for body in bodies:
        assert live.post("/detokenize", body).status_code == 400
