"""The chat endpoint over real HTTP: shapes, streaming, usage, log-probabilities, choices, stops."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serve.live import Live

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def test_whole_answer_has_openais_shape(live: Live) -> None:
    response = live.chat()
    assert response.status_code == 200
    body = response.json()
    answer = ChatCompletion.model_validate(body)
    (choice,) = answer.choices
    assert choice.message.content == " one two three"
    assert choice.finish_reason == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert answer.usage is not None
    prompt = live.tokenizer.encode(live.tokenizer.chat_template.render(USER))  # type: ignore[union-attr]
    # The end token was generated, too.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 4)
    assert answer.usage.total_tokens == len(prompt) + 4
    assert answer.model == "tiny-test"
    assert body["id"].startswith("chatcmpl-")


def test_streamed_answer(live: Live) -> None:
    events = live.stream(PATH, {"messages": USER})
    assert events.pop() == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == " one two three"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert all(c.usage is None for c in chunks)


def test_streamed_usage(live: Live) -> None:
    plain = live.stream(PATH, {"messages": USER, "stream_options": {"include_usage": True}})
    assert plain[-2]["choices"] == []
    assert plain[-2]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in plain[:-2])
    running = live.stream(
        PATH, {"messages": USER, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    counts = [event["usage"]["completion_tokens"] for event in running[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_cached_tokens_are_reported(live: Live) -> None:
    long = "Tell me about the sea. " * 20
    live.chat(long)
    usage = live.chat(long).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] % 16 == 0
    salted = live.chat(long, cache_salt="x").json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(live: Live, stream: bool) -> None:
    live.says(" yes 你好")
    fields: dict[str, Any] = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    if stream:
        events = live.stream(PATH, fields)[:-1]
        content = [e for event in events for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        content = live.post(PATH, fields).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == " yes 你好"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["logprob"] == -0.25 for entry in content)
    assert content[0]["token"] == " yes"


def test_logprobs_without_alternatives(live: Live) -> None:
    content = live.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], [], []]


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_have_their_own_seeds(live: Live, stream: bool) -> None:
    words = [tuple(live.tokenizer.encode(f" answer {i}")) for i in range(3)]
    live.engine.backend.script = lambda spec: words[int(spec.request_id.rsplit("-", 1)[1])]
    fields: dict[str, Any] = {"messages": USER, "n": 3, "seed": 7}
    texts = {0: "", 1: "", 2: ""}
    if stream:
        roles = []
        for event in live.stream(PATH, fields)[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
                roles += [choice["index"]] if "role" in choice["delta"] else []
        assert sorted(roles) == [0, 1, 2]
    else:
        body = live.post(PATH, fields).json()
        texts = {choice["index"]: choice["message"]["content"] for choice in body["choices"]}
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == sum(len(w) + 1 for w in words)
        assert body["usage"]["prompt_tokens"] == len(live.engine.backend.seen[0].prompt)
    assert texts == {i: f" answer {i}" for i in range(3)}
    seeds = [spec.sampling.seed for spec in sorted(live.engine.backend.seen, key=lambda s: s.request_id)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_seed_is_random_unless_given(live: Live) -> None:
    live.chat()
    live.chat()
    live.chat(seed=-1)
    first, second, third = (spec.sampling.seed for spec in live.engine.backend.seen)
    assert first != second
    assert third == (1 << 64) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_token_borders(live: Live, stream: bool, include: bool) -> None:
    live.says(" one two three four five six")
    live.engine.step_s = 0.002
    fields: dict[str, Any] = {"messages": USER, "stop": ["wo thr"], "include_stop_str_in_output": include}
    want = " one t" + ("wo thr" if include else "")
    if stream:
        events = live.stream(PATH, fields)[:-1]
        text = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
        choice = events[-1]["choices"][0]
    else:
        body = live.post(PATH, fields).json()
        choice = body["choices"][0]
        text = choice["message"]["content"]
        assert body["usage"]["completion_tokens"] == 3
    assert text == want
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wo thr")


def test_stop_string_with_logprobs_shows_no_more_than_the_text(live: Live) -> None:
    live.says(" one two three four")
    choice = live.chat(stop=" two", logprobs=True).json()["choices"][0]
    assert choice["message"]["content"] == " one"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" one"]


def test_stop_token_ids_and_ignore_eos(live: Live) -> None:
    three = live.tokenizer.encode(" three")[0]
    choice = live.chat(stop_token_ids=[three]).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (" one two", three)
    choice = live.chat(ignore_eos=True, max_tokens=6).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert live.engine.backend.seen[-1].sampling.stop_token_ids == ()


def test_max_tokens(live: Live) -> None:
    ways: list[dict[str, Any]] = [{"max_tokens": 2}, {"max_completion_tokens": 2}]
    for fields in (*ways, {"max_tokens": 3, "max_completion_tokens": 2}):
        body = live.chat(**fields).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"]["content"] == " one two"
        assert body["usage"]["completion_tokens"] == 2
    live.chat()
    spec = live.engine.backend.seen[-1]
    assert spec.sampling.max_tokens == 2048 - len(spec.prompt)


def test_sampling_fields_reach_the_engine(live: Live) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "88": 2.5},
        "min_tokens": 1,
        "seed": 5,
    }
    assert live.chat(**fields).status_code == 200
    sampling = live.engine.backend.seen[-1].sampling
    for name, value in fields.items():
        assert getattr(sampling, name) == (value if name != "logit_bias" else ((5, -100.0), (88, 2.5)))


def test_zero_top_p_is_the_best_token(live: Live) -> None:
    live.chat(top_p=0)
    assert live.engine.backend.seen[-1].sampling.top_k == 1


def test_messages_become_the_prompt(live: Live) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    live.post(
        PATH,
        {
            "messages": [
                {"role": "developer", "content": "Be brief.", "name": "ops"},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "A"},
                {"role": "user", "content": "more"},
            ]
        },
    )
    text = live.tokenizer.decode(live.engine.backend.seen[-1].prompt, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continue_final_message(live: Live) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    assert live.post(PATH, {"messages": messages, "continue_final_message": True}).status_code == 200
    text = live.tokenizer.decode(live.engine.backend.seen[-1].prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe answer is")


def test_service_tier_says_what_was_applied(live: Live) -> None:
    assert "service_tier" not in live.chat().json()
    for tier, applied, kind in (
        ("auto", "default", "standard"),
        ("default", "default", "standard"),
        ("priority", "priority", "interactive"),
        ("flex", "flex", "batch"),
    ):
        answer = live.chat(service_tier=tier)
        assert answer.json()["service_tier"] == applied
        assert answer.json()["paceline"]["class"] == kind
        assert answer.headers["x-paceline-class"] == kind


def test_a_request_brings_its_own_targets(live: Live) -> None:
    before = live.get("/slo").json()["classes"]["interactive"]["ttft"]["n"]
    answer = live.chat(paceline={"class": "interactive", "itl_ms": 250})
    assert answer.json()["paceline"] == {"class": "interactive", "ttft_ms": 1000.0, "itl_ms": 250.0, "e2e_ms": None}
    live.stream(PATH, {"messages": USER, "service_tier": "priority"})
    report = live.get("/slo").json()["classes"]["interactive"]
    assert report["ttft"]["n"] == before + 2
    assert report["ttft"]["target_s"] == 1.0
    assert report["kept"] is True
    budget = live.get("/slo").json()["prefill_budget"]
    assert budget["last"]["step"] == live.get("/slo").json()["step"]["step"]
    assert live.metric("paceline:slo_attained", **{"class": "interactive", "quantity": "ttft"}) == 1.0
    assert live.metric("paceline:slo_margin", **{"class": "interactive"}) == pytest.approx(0.05)
    shown = {labels["class"] for labels, _ in live.samples("paceline:slo_attained")}
    assert "interactive" in shown
    assert "batch" not in shown, "it promises nothing"
    steps = live.metric("paceline:step_duration_seconds_count")
    assert live.metric("paceline:scheduler_step_seconds_count") == steps
    assert live.metric("paceline:scheduler_step_seconds_sum") > 0.0
    rows = live.get("/timeline/steps").json()
    assert len(rows["rows"]) > 1
    assert rows["itl_s"] == 0.1
    assert "What each step did" in live.get("/timeline").text


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"service_tier": "gold"}, 400, "service_tier"),
        ({"paceline": {"class": "gold"}}, 400, "paceline.class"),
        ({"paceline": {"itl_ms": 0}}, 400, "paceline.itl_ms"),
        ({"paceline": {"ttft_ms": -5}}, 400, "paceline.ttft_ms"),
        ({"service_tier": "flex", "paceline": {"class": "interactive"}}, 400, "paceline.class"),
        ({"paceline": {"ttft_ms": 500, "e2e_ms": 100}}, 400, "paceline.ttft_ms"),
        ({"paceline": {"itl_ms": 101, "e2e_ms": 100}}, 400, "paceline.itl_ms"),
    ],
)
def test_bad_classes_and_targets(live: Live, body: dict[str, Any], status: int, param: str) -> None:
    answer = live.chat(**body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_contradicting_targets_are_both_named(live: Live) -> None:
    error = live.chat(paceline={"ttft_ms": 500, "e2e_ms": 100}).json()["error"]
    assert "paceline.ttft_ms 500 is above paceline.e2e_ms 100" in error["message"]


@pytest.mark.parametrize(
    ("own", "applied"),
    [
        ({"e2e_ms": 1000}, (1000, 250, 1000)),  # the class's first token would have been due after the last
        ({"e2e_ms": 100}, (100, 100, 100)),
        ({"e2e_ms": 9000}, (5000, 250, 9000)),
        ({"ttft_ms": 100, "itl_ms": 100, "e2e_ms": 100}, (100, 100, 100)),
        ({"class": "batch", "e2e_ms": 1000}, (None, None, 1000)),
    ],
)
def test_no_target_lies_beyond_that_of_the_last_token(
    live: Live, own: dict[str, Any], applied: tuple[float | None, ...]
) -> None:
    told = live.chat(paceline=own).json()["paceline"]
    assert (told["ttft_ms"], told["itl_ms"], told["e2e_ms"]) == applied


def test_a_character_is_never_cut_in_two(live: Live) -> None:
    live.says("你好 😀!")
    events = live.stream(PATH, {"messages": USER})[:-1]
    pieces = [c["delta"].get("content") or "" for event in events for c in event["choices"]]
    assert "".join(pieces) == "你好 😀!"
    assert not any("\ufffd" in piece for piece in pieces)
