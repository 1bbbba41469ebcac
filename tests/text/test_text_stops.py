"""Stop strings: never shown, wherever the borders of tokens lie."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.step import TokenLogprob
from paceline.text.stops import StopMatcher
from paceline.text.stream import ShownToken, TextStream
from paceline.text.tokenizer import Tokenizer

ALPHABET = "ab "


def expected_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the first stop string to be complete, by reading it character by character."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(text=texts, stops=stop_lists, data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_cut_gives_the_same_end(text: str, stops: list[str], data: st.DataObject) -> None:
    want, which = expected_cut(text, stops)
    matcher = StopMatcher(stops)
    shown = ""
    for part in cut(data, text):
        shown += matcher.push(part)
        assert want.startswith(shown), "shown text must never have to be taken back"
    shown += matcher.flush()
    assert (shown, matcher.matched) == (want, which)


@given(text=texts, stops=stop_lists)
@example(text="aab", stops=["ab", "b"])
@settings(max_examples=100, deadline=None)
def test_nothing_is_held_longer_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for char in text:
        shown += matcher.push(char)
        if matcher.matched is not None:
            return
        held = len(matcher._held)
        assert held < max((len(s) for s in stops), default=1)
        assert held == 0 or any(s.startswith(matcher._held) for s in stops)


@given(data=st.data(), include=st.booleans())
@settings(max_examples=200, deadline=None)
def test_stream_ends_at_a_stop_string(default_tokenizer: Tokenizer, data: st.DataObject, include: bool) -> None:
    words = st.sampled_from(["one", " two", " three", "\n", "###", " 你好", "😀", "!"])
    text = "".join(data.draw(st.lists(words, min_size=1, max_size=12)))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    ids = default_tokenizer.encode(text)
    want, which = expected_cut(text, [stop])
    if include:
        want += which or ""
    stream = TextStream(default_tokenizer, stops=[stop], include_stop=include)
    shown = ""
    tokens: list[ShownToken] = []
    for token in ids:
        piece = stream.push([token], [TokenLogprob(token, -1.0, 1)])
        shown += piece.text
        tokens += piece.tokens
        assert want.startswith(shown)
    last = stream.finish()
    tokens += last.tokens
    assert shown + last.text == want
    assert stream.stop_string == stop
    # Tokens never tell more than the text: those shown begin inside it, in order, from the first on.
    assert [t.token for t in tokens] == ids[: len(tokens)]
    assert all(t.offset < len(want) for t in tokens)
    # The answer's tokens end with the one that completed the stop string.
    assert text.startswith(default_tokenizer.decode(ids[: stream.used - 1], skip_special_tokens=False).rstrip("\ufffd"))
    assert stop in default_tokenizer.decode(ids[: stream.used])


def test_min_tokens_ignores_stops_before_it(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode(" stop stop stop")
    stream = TextStream(default_tokenizer, stops=[" stop"], min_tokens=2)
    shown = "".join(stream.push([i]).text for i in ids) + stream.finish().text
    assert shown == " stop stop"
    assert stream.used == 3


def test_stop_token_is_counted_and_not_shown(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode(" yes no")
    stream = TextStream(default_tokenizer)
    piece = stream.push(ids, stop_token=ids[-1])
    assert piece.text == " yes"
    assert len(piece.tokens) == 1
    assert stream.used == 2
    assert stream.finish().text == ""
    with_it = TextStream(default_tokenizer, include_stop=True)
    assert with_it.push(ids, stop_token=ids[-1]).text == " yes no"


def test_tokens_wait_for_their_text(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode(" one two")
    stream = TextStream(default_tokenizer, stops=[" two three"])
    assert [t.token for t in stream.push([ids[0]]).tokens] == [ids[0]]
    assert stream.push([ids[1]]).tokens == ()
    last = stream.finish()
    assert (last.text, [t.token for t in last.tokens]) == (" two", [ids[1]])
