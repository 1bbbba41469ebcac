"""Incremental decoding equals decoding at once, for any ids cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.text.decoding import REPLACEMENT
from paceline.text.stream import TextStream
from paceline.text.tokenizer import Tokenizer
from tests.text.conftest import EOS, KINDS

SMALL = {name: Tokenizer(make(), EOS, None) for name, make in KINDS.items()}
EXPECTED_KINDS = {"suffix": "window", "byte_level": "byte-level"}


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    decoder = tokenizer.start_decoding()
    pieces = [decoder.push(i) for i in ids if not (skip and tokenizer.is_special(i))]
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("name", KINDS)
def test_kind_is_recognised(name: str) -> None:
    assert SMALL[name]._kind.name == EXPECTED_KINDS.get(name, "pieces")


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_full_text(name: str, data: st.DataObject) -> None:
    tokenizer = SMALL[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    skip = data.draw(st.booleans())
    pieces = pieces_of(tokenizer, ids, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_default_model_any_ids(default_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, default_tokenizer.vocab_size - 1), max_size=32))
    assert "".join(pieces_of(default_tokenizer, ids, True)) == default_tokenizer.decode(ids)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_half_characters(default_tokenizer: Tokenizer, text: str) -> None:
    """Valid text never shows a replacement character on its way, and every piece is whole characters."""
    ids = default_tokenizer.encode(text)
    assume(default_tokenizer.decode(ids, skip_special_tokens=False) == text)  # a few bytes are not in its vocabulary
    shown = ""
    for piece in pieces_of(default_tokenizer, ids, False):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@given(text=st.text(st.sampled_from("hello world.é你😀 x"), max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_half_characters_with_byte_fallback(text: str) -> None:
    tokenizer = SMALL["byte_fallback"]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, True)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_characters_are_shown_as_soon_as_they_are_whole(default_tokenizer: Tokenizer) -> None:
    decoder = default_tokenizer.start_decoding()
    ids = default_tokenizer.encode("你好")
    shown = [decoder.push(i) for i in ids]
    assert len(ids) > 2, "the test needs a text whose characters are cut"
    assert "".join(shown) == "你好"
    assert "" in shown


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace_always", "metaspace_first"])
def test_leading_space_is_dropped_once(name: str) -> None:
    tokenizer = SMALL[name]
    hello, world = (tokenizer._fast.token_to_id(p) for p in ("▁hello", "▁world"))
    assert pieces_of(tokenizer, [hello, world], True) == ["hello", " world", ""]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_token_bytes_join_to_the_text(default_tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=30))
    ids = default_tokenizer.encode(text)
    assume(default_tokenizer.decode(ids, skip_special_tokens=False) == text)
    assert b"".join(map(default_tokenizer.token_bytes, ids)) == text.encode()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_stream_is_the_same_however_cut(default_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, default_tokenizer.vocab_size - 1), max_size=20))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    stream = TextStream(default_tokenizer)
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces = [stream.push(part) for part in parts] + [stream.finish()]
    assert "".join(p.text for p in pieces) == default_tokenizer.decode(ids)
    assert [t.token for p in pieces for t in p.tokens] == ids
    assert stream.used == len(ids)
