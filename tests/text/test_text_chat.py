"""Chat rendering equals transformers' own, on the templates that checkpoints carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadRequest, CorruptModel
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from tests.text.conftest import EOS, byte_fallback_bpe

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}

USER = {"role": "user", "content": "  What is <b>5 & 3</b>? 你好\n"}
SYSTEM = {"role": "system", "content": 'Be "brief".'}
ANSWER = {"role": "assistant", "content": "Eight. "}
THOUGHT = {"role": "assistant", "content": "8", "reasoning_content": "5 + 3"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": [3, "é"]}}}],
}
RESULT = {"role": "tool", "content": "8"}
TOOL = {"type": "function", "function": {"name": "add", "description": "sums <x>", "parameters": {"type": "object"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "again"}],
    "thoughts": [USER, THOUGHT, {"role": "user", "content": "sure?"}, THOUGHT],
    "call": [USER, CALL, RESULT],
    "two_users": [USER, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "stops": [USER, {"role": "user", "content": "STOP"}, ANSWER],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_fallback_bpe(), **EOS)


def both(reference: Any, name: str, chat: list[dict[str, Any]], **options: Any) -> tuple[str | None, str | None]:
    """Our text and transformers'; None where one refuses."""
    theirs: str | None
    try:
        theirs = reference.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, **options)
    except Exception:
        theirs = None
    tools = options.pop("tools", None)
    flags = {k: options.pop(k) for k in ("add_generation_prompt", "continue_final_message") if k in options}
    ours: str | None
    try:
        ours = ChatTemplate(TEMPLATES[name], EOS).render(
            chat, tools=tools, variables=options, **{"add_generation_prompt": False, **flags}
        )
    except BadRequest:
        ours = None
    return ours, theirs


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_text_as_transformers(reference: Any, name: str, chat: str) -> None:
    for options in ({}, {"add_generation_prompt": True}, {"tools": [TOOL], "add_generation_prompt": True}):
        ours, theirs = both(reference, name, CHATS[chat], **options)
        assert ours == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_continued_message_is_the_same(reference: Any, name: str) -> None:
    for last in ("Eight", "Eight. ", " eight\n", ""):
        chat = [USER, {"role": "assistant", "content": last}]
        ours, theirs = both(reference, name, chat, continue_final_message=True)
        assert ours == theirs


def test_template_variables_reach_the_template(reference: Any) -> None:
    for value in (True, False):
        ours, theirs = both(reference, "qwen3", [USER], add_generation_prompt=True, enable_thinking=value)
        assert ours == theirs
    ours, theirs = both(reference, "llama3", [USER], date_string="1 Jan 2030")
    assert ours == theirs
    assert "1 Jan 2030" in (ours or "")


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=20)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_conversation_of_the_default_model(default_tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> None:
    template = default_tokenizer.chat_template
    assert template is not None
    chat = [{"role": role, "content": text} for role, text in turns]
    if not chat:
        with pytest.raises(BadRequest, match="empty"):
            template.render(chat)
        return
    text = template.render(chat)
    assert text.endswith("<|im_start|>assistant\n")
    assert all(turn["content"] in text for turn in chat)


def test_default_model_ids_equal_transformers(default_tokenizer_dir: Path, default_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_tokenizer_dir)
    assert default_tokenizer.chat_template is not None
    for chat in (CHATS["one"], CHATS["system"], CHATS["turns"]):
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        text = default_tokenizer.chat_template.render(chat)
        assert default_tokenizer.encode(text, add_special_tokens=False) == ids


def test_reserved_words_cannot_be_replaced() -> None:
    template = ChatTemplate(TEMPLATES["phi3"], EOS)
    plain = template.render([{"role": "user", "content": "hi"}])
    stolen = {"messages": [], "add_generation_prompt": False, "tools": 1, "documents": 1}
    assert template.render([{"role": "user", "content": "hi"}], variables=stolen) == plain


def test_refusal_of_a_template_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="must alternate") as caught:
        ChatTemplate(TEMPLATES["llama2"], EOS).render([ANSWER])
    assert caught.value.param == "messages"


def test_messages_that_trip_the_template_are_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="cannot render"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"role": "user", "content": "x"}])


def test_both_ends_exclude_each_other() -> None:
    with pytest.raises(BadRequest, match="exclude each other"):
        ChatTemplate(TEMPLATES["phi3"], EOS).render([ANSWER], continue_final_message=True, add_generation_prompt=True)


def test_invalid_template_refuses_to_load() -> None:
    with pytest.raises(CorruptModel, match="not valid"):
        ChatTemplate("{% for x in %}", {})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
    ],
)
def test_sandbox_holds(attack: str) -> None:
    try:
        shown = ChatTemplate(attack, {}).render([{"role": "user", "content": "x"}])
    except BadRequest:
        return
    assert shown.strip() == ""


def test_how_content_is_wanted_is_found_by_trying() -> None:
    assert ChatTemplate(TEMPLATES["parts_only"], EOS).wants_parts
    assert not any(ChatTemplate(t, EOS).wants_parts for name, t in TEMPLATES.items() if name != "parts_only")
