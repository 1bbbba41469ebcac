"""Prompt texts whose length is right in the server's tokens.

Texts are sequences of short common English words, which byte-pair and unigram vocabularies hold as one token each with
their leading space. `tokencheck.py` asks the server whether that is so and drops the words for which it is not. Every
prompt opens with one fixed word, because a first word without a space may be cut otherwise.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.measure.records import TokenFit
from paceline.measure.schedule import Arrival, seeded

OPENING = "the"
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city community name president team minute idea body information back parent
    face others level office door health person art war history party result change morning reason research girl guy
    moment air teacher force education foot boy age policy process music market sense nation plan college interest death
    experience effect use class control field development role effort rate heart drug show leader light voice wife
    police mind price report decision son view town road arm difference value building action season society tax
    director position player record paper space ground form event official matter center couple site project activity
    star table need court oil situation cost industry figure street image phone data picture practice piece land product
    doctor wall patient worker news test movie north love support technology step baby computer type attention film
    tree source organization hair look window culture chance brother energy period course summer hospital series bed
    store option leg letter floor material population style economy order wind sound rock river fire glass
    stone
"""
WORDS = tuple(_WORDS.split())


class PromptMaker:
    """Makes the text of any arrival. The same seed, salt and fit give the same text in every process."""

    def __init__(self, seed: int, salt: str, fit: TokenFit, words: tuple[str, ...] = WORDS) -> None:
        self._key = f"{seed}:{salt}"
        self._fit = fit
        self._words = words
        self._shared = lru_cache(maxsize=2048)(self._draw)  # prefixes and blocks are asked for again and again

    def _draw(self, tag: str, count: int) -> str:
        """`count` words, each with a leading space."""
        if count <= 0:
            return ""
        return " " + " ".join(seeded(f"{self._key}:{tag}").choices(self._words, k=count))

    def words_for(self, tokens: int) -> int:
        """How many words make so many tokens, beside what the template adds and the opening word."""
        return max(0, round((tokens - self._fit.overhead_tokens) / self._fit.tokens_per_word) - 1)

    def reachable(self, tokens: int) -> bool:
        """A prompt cannot be shorter than the template and one word."""
        return tokens > self._fit.overhead_tokens

    def text(self, arrival: Arrival, turn: int = 0, phase: str = "measure") -> str:
        """The user's text of one turn."""
        own = f"{phase}:{arrival.index}:{turn}"
        prefix_words = self.words_for(arrival.prefix_tokens) if arrival.prefix_tokens else 0
        if arrival.texts:
            text = arrival.texts[turn]
            if turn == 0 and prefix_words:
                return f"{OPENING}{self._shared(arrival.prefix, prefix_words)}\n{text}"
            return text
        tokens = arrival.inputs[turn] or 1
        if turn > 0:
            return OPENING + self._draw(own, max(0, round(tokens / self._fit.tokens_per_word) - 1))
        total = self.words_for(tokens)
        if arrival.blocks:
            return OPENING + self._blocks(arrival, total, own)
        prefix_words = min(prefix_words, total)
        shared = self._shared(arrival.prefix, prefix_words) if prefix_words else ""
        return OPENING + shared + self._draw(own, total - prefix_words)

    def _blocks(self, arrival: Arrival, total: int, own: str) -> str:
        """Text that is shared exactly as far as leading block ids are equal.

        The first block is shorter by the template's tokens and the opening word, so that borders fall where the
        trace's did. The last one is cut to the prompt's length.
        """
        size = max(1, round(arrival.block_tokens / self._fit.tokens_per_word))
        first = max(0, self.words_for(arrival.block_tokens))
        parts: list[str] = []
        left = total
        for place, block in enumerate(arrival.blocks):
            if left <= 0:
                break
            whole = first if place == 0 else size
            text = self._shared(f"block:{block}", whole)
            if left < whole:
                text = "".join(f" {word}" for word in text.split()[:left])
            parts.append(text)
            left -= whole
        if left > 0:  # the trace's ids cover less than its length
            parts.append(self._draw(own, left))
        return "".join(parts)
