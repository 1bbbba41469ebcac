"""Log-probabilities in the two shapes of the OpenAI API, as plain values ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.core.step import TokenLogprob
from paceline.text.stream import ShownToken
from paceline.text.tokenizer import Tokenizer

# The API's word for "very unlikely": JSON has no infinity.
FLOOR = -9999.0


def chat_entries(tokenizer: Tokenizer, tokens: Iterable[ShownToken], top: int) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: each token with its bytes and its `top` most likely alternatives."""
    return [
        _entry(tokenizer, token.token, token.logprob.logprob)
        | {"top_logprobs": [_entry(tokenizer, i, p) for i, p in token.logprob.top[:top]]}
        for token in tokens
        if token.logprob is not None
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token),
        "logprob": max(logprob, FLOOR),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of the older endpoint: four parallel lists."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, token: int, offset: int, logprob: TokenLogprob | None) -> None:
        """Append one token; the first of a prompt has no log-probability."""
        self.tokens.append(self._tokenizer.token_text(token))
        self.text_offset.append(offset)
        if logprob is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(max(logprob.logprob, FLOOR))
        top: dict[str, float] = {}
        for other, value in logprob.top[: self._top]:
            top.setdefault(self._tokenizer.token_text(other), max(value, FLOOR))
        # The chosen token is always among them, as in the API: up to `top` + 1 entries.
        top.setdefault(self._tokenizer.token_text(token), max(logprob.logprob, FLOOR))
        self.top_logprobs.append(top)

    def as_json(self) -> dict[str, Any]:
        """The four lists as a fresh object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
