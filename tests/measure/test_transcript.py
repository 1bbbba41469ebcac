"""Which event is a token, and what counts as success."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.measure.records import ErrorClass, Kind, Usage
from paceline.measure.transcript import Transcript


def read(*payloads: Any, end: bool = True) -> Transcript:
    """One event a network read."""
    transcript = Transcript(streaming=True)
    for i, payload in enumerate(payloads):
        data = payload.encode() if isinstance(payload, str) else msgspec.json.encode(payload)
        transcript.feed(b"data: " + data + b"\n\n", i)
    if end:
        transcript.finish()
    return transcript


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def kinds(transcript: Transcript) -> str:
    return "".join(transcript.kinds)


FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def test_role_content_finish_usage_done() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    transcript = read(
        delta(role="assistant", content=""), delta(content="a"), delta(content=" b"), FINISH, usage, "[DONE]"
    )
    assert kinds(transcript) == "RccFUD"
    assert transcript.text == "a b"
    assert transcript.row_chars == [0, 1, 2, 0, 0, 0]
    assert transcript.usage == Usage(prompt_tokens=5, completion_tokens=2)
    assert transcript.verdict(choices=1, forced=2) == (None, "")


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"content": "x"}, Kind.CONTENT, "x"),
        ({"role": "assistant", "content": "x"}, Kind.CONTENT, "x"),
        ({"content": [{"type": "text", "text": "x"}]}, Kind.CONTENT, "x"),
        ({"reasoning_content": "r"}, Kind.REASONING, "r"),
        ({"reasoning": "r", "reasoning_content": "r"}, Kind.REASONING, "r"),
        ({"content": None, "reasoning": "r"}, Kind.REASONING, "r"),
        ({"content": "c", "reasoning_content": "r"}, Kind.MULTI, "rc"),
        ({"refusal": "no"}, Kind.REFUSAL, "no"),
        ({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}, Kind.TOOL, "f"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, Kind.TOOL, '{"a"'),
        ({"function_call": {"name": "f"}}, Kind.TOOL, "f"),
        ({"tool_calls": []}, Kind.ROLE, ""),
        ({"role": "assistant"}, Kind.ROLE, ""),
        ({"content": ""}, Kind.ROLE, ""),
        ({}, Kind.ROLE, ""),
    ],
)
def test_channels(fields: dict[str, Any], kind: str, text: str) -> None:
    transcript = read(delta(**fields))
    assert transcript.kinds == [kind]
    assert transcript.text == text


def test_a_running_count_that_grew_is_a_token_without_text() -> None:
    def running(count: int, **fields: Any) -> dict[str, Any]:
        return delta(**fields) | {"usage": {"prompt_tokens": 3, "completion_tokens": count}}

    transcript = read(
        running(0, role="assistant"), running(1, content=""), running(3, content="é"), running(3, content="")
    )
    assert kinds(transcript) == "RgcR"
    assert transcript.row_tokens == [None, 1, 2, None]


def test_a_total_that_comes_with_the_finish_is_no_token() -> None:
    last = FINISH | {"usage": {"completion_tokens": 7}}
    assert kinds(read(delta(content="a"), last, "[DONE]")) == "cFD"


@pytest.mark.parametrize("count", [-1, True, "7", 2.5, 10**20, None])
def test_counts_that_are_none_are_not_told(count: Any) -> None:
    transcript = read(delta(content="a"), {"choices": [], "usage": {"completion_tokens": count}}, "[DONE]")
    assert transcript.usage is None
    assert len(transcript.columns()["kinds"]) == 3


def test_usage_in_the_last_content_chunk_is_taken() -> None:
    payload = {"choices": [{"index": 0, "text": "b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
    transcript = read({"choices": [{"index": 0, "text": "a"}]}, payload)
    assert kinds(transcript) == "xx"
    assert transcript.usage == Usage(completion_tokens=2)
    assert transcript.verdict(choices=1, forced=2) == (None, "")


def test_details_are_parts_of_the_totals() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 100,
        "completion_tokens_details": {"reasoning_tokens": 60},
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert read({"choices": [], "usage": usage}).usage == Usage(
        prompt_tokens=9, completion_tokens=100, cached_tokens=4, reasoning_tokens=60
    )


def test_tokens_told_by_ids_and_logprobs() -> None:
    by_ids = {"choices": [{"index": 0, "delta": {"content": "abc"}, "token_ids": [1, 2, 3]}]}
    by_logprobs = {"choices": [{"index": 0, "delta": {"content": "de"}, "logprobs": {"content": [{}, {}]}}]}
    assert read(by_ids, by_logprobs).row_tokens == [3, 2]


@pytest.mark.parametrize(
    "payload",
    [
        {"error": {"message": "boom", "code": 500}},
        {"error": "boom"},
        {"object": "error", "message": "boom"},
    ],
)
def test_an_error_event_fails_the_request_whatever_follows(payload: dict[str, Any]) -> None:
    transcript = read(delta(content="a"), payload, FINISH, "[DONE]")
    assert transcript.verdict(choices=1, forced=None) == (ErrorClass.SERVER_ERROR_IN_STREAM, "boom")


def test_vendor_events_are_ignored() -> None:
    transcript = Transcript(streaming=True)
    transcript.feed(b'event: ping\ndata: not json\n\ndata: {"type":"vendor"}\n\ndata: 17\n\ndata: \n\n', 0)
    transcript.feed(b'data: {"choices":[{"delta":{"content":"a"}}],"vendor":{}}\n\ndata: [DONE]\n\n', 1)
    transcript.finish()
    assert kinds(transcript) == "OOOcD"
    assert transcript.verdict(choices=1, forced=None) == (None, "")


def test_broken_json_is_malformed_and_at_the_end_of_a_stream_truncated() -> None:
    assert read(delta(content="a"), "{broken").verdict(choices=1, forced=None)[0] is ErrorClass.MALFORMED
    transcript = Transcript(streaming=True)
    transcript.feed(b'data: {"choices":[{"del', 0)
    transcript.finish()
    assert transcript.verdict(choices=1, forced=None)[0] is ErrorClass.TRUNCATED


def test_the_end_needs_a_marker() -> None:
    assert read(delta(content="a")).verdict(choices=1, forced=None)[0] is ErrorClass.TRUNCATED
    assert read(delta(content="a"), FINISH).verdict(choices=1, forced=None)[0] is None
    assert read(delta(content="a"), FINISH).verdict(choices=2, forced=None)[0] is ErrorClass.TRUNCATED
    assert read("[DONE]").verdict(choices=1, forced=None)[0] is None


def test_forced_lengths() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 10}}
    assert read(usage, "[DONE]").verdict(choices=1, forced=1024)[0] is ErrorClass.SHORT
    assert read(usage, "[DONE]").verdict(choices=1, forced=10)[0] is None
    assert read(FINISH, "[DONE]").verdict(choices=1, forced=10)[0] is ErrorClass.SHORT


def test_several_choices_keep_their_rows_apart() -> None:
    both = {"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {"content": "b"}}]}
    one = {"choices": [{"index": 1, "delta": {"content": "c"}}]}
    columns = read(both, one, "[DONE]").columns()
    assert columns["kinds"] == "cccD"
    assert columns["row_choices"] == (0, 1, 1, 0)
    assert columns["row_events"] == (0, 0, 1, 2)
    assert columns["row_reads"] == (0, 0, 1, 2)
    assert columns["text"] == "abc"


def test_a_whole_body() -> None:
    transcript = Transcript(streaming=False)
    body = {"id": "x", "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    data = msgspec.json.encode(body | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    transcript.feed(data[:10], 0)
    transcript.feed(data[10:], 1)
    transcript.finish()
    assert kinds(transcript) == Kind.BODY
    assert transcript.text == "hi"
    assert not transcript.columns()["done_seen"]
    assert transcript.verdict(choices=1, forced=1) == (None, "")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": 3}'])
def test_bodies_that_are_no_answer(body: bytes) -> None:
    transcript = Transcript(streaming=False)
    transcript.feed(body, 0)
    transcript.finish()
    assert transcript.verdict(choices=1, forced=None)[0] is ErrorClass.MALFORMED
