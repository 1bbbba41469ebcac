"""Prompt texts: the right length in the server's tokens, shared where they should be and nowhere else."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.prompts import OPENING, WORDS, PromptMaker
from paceline.measure.records import TokenFit
from paceline.measure.schedule import Arrival

FIT = TokenFit(method="usage", overhead_tokens=7)


def arrival(index: int, tokens: int | None, **more: object) -> Arrival:
    return Arrival(index=index, inputs=(tokens,), outputs=(1,), **more)  # type: ignore[arg-type]


def tokens_of(text: str) -> int:
    """As a server would count whose template adds seven tokens and whose vocabulary holds each word."""
    return len(text.split()) + 7


@given(st.integers(8, 3000), st.integers(0, 10**9))
def test_lengths_are_exact_where_words_are_tokens(tokens: int, seed: int) -> None:
    assert tokens_of(PromptMaker(seed, "", FIT).text(arrival(0, tokens))) == tokens


def test_the_shortest_prompt_is_one_word() -> None:
    maker = PromptMaker(0, "", FIT)
    assert maker.text(arrival(0, 1)) == OPENING
    assert not maker.reachable(7)
    assert maker.reachable(8)


def test_words_of_more_tokens_give_fewer_words() -> None:
    fit = TokenFit(method="usage", overhead_tokens=0, tokens_per_word=1.25)
    assert len(PromptMaker(0, "", fit).text(arrival(0, 1000)).split()) == 800


def test_same_seed_same_text_and_other_seed_salt_or_index_other_text() -> None:
    text = PromptMaker(1, "", FIT).text(arrival(5, 200))
    assert text == PromptMaker(1, "", FIT).text(arrival(5, 200))
    others = [
        PromptMaker(2, "", FIT).text(arrival(5, 200)),
        PromptMaker(1, "x", FIT).text(arrival(5, 200)),
        PromptMaker(1, "", FIT).text(arrival(6, 200)),
    ]
    for other in others:
        assert shared_words(text, other) <= 4


def shared_words(a: str, b: str) -> int:
    """How many leading words are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split(), b.split(), strict=False)))


def test_prefix_groups_share_exactly_their_prefix() -> None:
    maker = PromptMaker(0, "", FIT)
    a, b, c = (maker.text(arrival(i, 300, prefix=g, prefix_tokens=120)) for i, g in ((0, "p0"), (1, "p0"), (2, "p1")))
    assert tokens_of(a) == tokens_of(b) == tokens_of(c) == 300
    assert 113 <= shared_words(a, b) <= 117  # 120 less the template's seven, and perhaps an equal word or two
    assert shared_words(a, c) <= 4


def test_trace_blocks_become_text_shared_as_far_as_the_ids_agree() -> None:
    maker = PromptMaker(0, "", FIT)

    def of(index: int, tokens: int, *blocks: int) -> str:
        return maker.text(arrival(index, tokens, blocks=blocks, block_tokens=64))

    a, b, c = of(0, 200, 1, 2, 3, 4), of(1, 250, 1, 2, 9, 8), of(2, 170, 1, 2, 3)
    assert [tokens_of(t) for t in (a, b, c)] == [200, 250, 170]
    assert 128 - 7 <= shared_words(a, b) <= 128 - 7 + 4  # two blocks of 64, the template counted in the first
    assert shared_words(a, c) == 170 - 7  # c is a whole prefix of a
    assert tokens_of(of(3, 500, 1)) == 500  # ids that cover less than the length: own text fills it


def test_given_texts_are_kept() -> None:
    maker = PromptMaker(0, "", FIT)
    talk = Arrival(index=0, inputs=(None, None), outputs=(1, 1), texts=("first", "second"))
    assert [maker.text(talk, turn) for turn in (0, 1)] == ["first", "second"]
    with_prefix = Arrival(index=0, inputs=(None,), outputs=(1,), texts=("own",), prefix="p", prefix_tokens=50)
    assert maker.text(with_prefix).endswith("\nown")
    assert len(maker.text(with_prefix).split()) == 50 - 7 + 1


def test_the_words_are_distinct_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert OPENING not in WORDS
