"""The tokenizer's files, and that its ids are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.step import TokenLogprob
from paceline.errors import CorruptModel, ModelNotFound
from paceline.text.logprobs import FLOOR, CompletionLogprobs, chat_entries
from paceline.text.stream import ShownToken
from paceline.text.tokenizer import Tokenizer
from tests.text.conftest import byte_fallback_bpe


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_ids_equal_transformers(default_tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = default_tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert default_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def reference(default_tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_tokenizer_dir)


def test_default_model_facts(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.eos_token_ids == (2,)
    assert default_tokenizer.is_special(2)
    assert not default_tokenizer.is_special(88)
    assert default_tokenizer.token_text(2) == "<|im_end|>"


def save(folder: Path, **config: Any) -> Path:
    byte_fallback_bpe().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
def test_added_ends_equal_transformers(tmp_path: Path, bos: bool | None, eos: bool | None) -> None:
    from transformers import AutoTokenizer

    flags = {k: v for k, v in {"add_bos_token": bos, "add_eos_token": eos}.items() if v is not None}
    save(
        tmp_path,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>", "special": True},
        unk_token="<unk>",
        **flags,
    )
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.encode("hello", add_special_tokens=False) == theirs.encode("hello", add_special_tokens=False)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_config_makes_tokens_special(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save(tmp_path, tokenizer_class="PreTrainedTokenizerFast", eos_token="▁world", pad_token="<absent>")
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("x") + list(ours.eos_token_ids)
    assert ours.is_special(ids[-1])
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "x"
    assert ours.vocab_size == byte_fallback_bpe().get_vocab_size()


def test_saved_truncation_is_dropped(tmp_path: Path) -> None:
    fast = byte_fallback_bpe()
    fast.enable_truncation(2)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(tmp_path).encode("x" * 20)) >= 20


def test_template_is_found_where_checkpoints_put_it(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for config, want in (({}, None), ({"chat_template": "C"}, "C"), ({"chat_template": named}, "D")):
        template = Tokenizer.from_dir(save(tmp_path, **config)).chat_template
        assert (template.source if template else None) == want
    (tmp_path / "chat_template.jinja").write_text("F")
    template = Tokenizer.from_dir(tmp_path).chat_template
    assert template is not None
    assert template.source == "F"


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CorruptModel, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(CorruptModel, match=r"tokenizer_config\.json cannot be read: nested too deeply"):
        Tokenizer.from_dir(tmp_path)
    for entry in ([5], [{"name": "default"}], [{"name": "other", "template": "x"}], 5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
        assert Tokenizer.from_dir(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptModel, match=r"chat_template\.jinja"):
        Tokenizer.from_dir(tmp_path)


def test_logprob_shapes(default_tokenizer: Tokenizer) -> None:
    hello, half = default_tokenizer.encode(" hello")[0], default_tokenizer.encode("你")[0]
    logprob = TokenLogprob(hello, -0.5, 1, ((hello, -0.5), (half, -2.0), (2, float("-inf"))))
    (entry,) = chat_entries(default_tokenizer, [ShownToken(hello, 0, logprob)], 3)
    assert (entry["token"], entry["bytes"], entry["logprob"]) == (" hello", list(b" hello"), -0.5)
    assert entry["top_logprobs"][1]["token"].startswith("bytes:\\x")
    assert bytes(entry["top_logprobs"][1]["bytes"]) == default_tokenizer.token_bytes(half)
    assert entry["top_logprobs"][2]["logprob"] == FLOOR
    lists = CompletionLogprobs(default_tokenizer, 1)
    lists.add(hello, 0, None)
    lists.add(half, 6, TokenLogprob(half, -3.0, 9, ((hello, -0.1),)))
    shape = lists.as_json()
    assert shape["token_logprobs"] == [None, -3.0]
    assert shape["text_offset"] == [0, 6]
    assert shape["top_logprobs"][0] is None
    assert set(shape["top_logprobs"][1]) == {" hello", default_tokenizer.token_text(half)}
