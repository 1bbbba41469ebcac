"""One choice's tokens becoming the text that a client may see."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from paceline.core.step import TokenLogprob
from paceline.text.stops import StopMatcher
from paceline.text.tokenizer import Tokenizer


class ShownToken(msgspec.Struct, frozen=True):
    """A token whose text has been shown, with its log-probability where asked for."""

    token: int
    offset: int  # characters of the text before it
    logprob: TokenLogprob | None


class Piece(msgspec.Struct, frozen=True):
    """What one push made visible."""

    text: str
    tokens: tuple[ShownToken, ...]


class TextStream:
    """Detokenizes, watches for stop strings and keeps tokens in step with the text that was shown.

    `used` counts the tokens that belong to the answer: all that were pushed, up to the one that completed a stop
    string. The text and the tokens of a stop string are not shown unless `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: a stop string counts only in the text after that many tokens."""
        self._tokenizer = tokenizer
        self._decoder = tokenizer.start_decoding()
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens if stops else 0
        self._waiting: deque[tuple[ShownToken, int]] = deque()  # with the length of the text after the token
        self._partial: list[ShownToken] = []  # the latest tokens, as long as they are but a part of a character
        self._decoded = 0  # characters decoded
        self._shown = 0  # characters shown
        self.used = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return self._matcher.matched

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), *, stop_token: int | None = None
    ) -> Piece:
        """Take the next tokens; return what can be shown now. After a stop string, further tokens are ignored.

        `logprobs` is parallel to `tokens` or empty. When the engine ended the request at `stop_token`, that last
        token is counted and, unless `include_stop`, not shown.
        """
        shown: list[str] = []
        for row, token in enumerate(tokens):
            if self.stop_string is not None:
                break
            self.used += 1
            if token == stop_token and row == len(tokens) - 1 and not self._include_stop:
                break
            shown.append(self._take(token, logprobs[row] if logprobs else None))
        return self._release("".join(shown))

    def finish(self) -> Piece:
        """What was held back, once the engine has nothing more to say."""
        text = ""
        if self.stop_string is None:
            text = self._match(self._decoder.flush())
            if self.stop_string is None:
                text += self._matcher.flush()
        return self._release(text, final=self.stop_string is None)

    def _take(self, token: int, logprob: TokenLogprob | None) -> str:
        offset = self._decoded
        skipped = self._skip_special and self._tokenizer.is_special(token)
        text = "" if skipped else self._decoder.push(token)
        self._decoded += len(text)
        self._partial.append(ShownToken(token, offset, logprob))
        if text or skipped:
            self._waiting.extend((part, self._decoded) for part in self._partial)
            self._partial.clear()
        if self.used <= self._min_tokens:
            return text
        return self._match(text)

    def _match(self, text: str) -> str:
        shown = self._matcher.push(text)
        if self._matcher.matched is not None and self._include_stop:
            shown += self._matcher.matched
        return shown

    def _release(self, text: str, *, final: bool = False) -> Piece:
        """Count `text` as shown and let go of the tokens that it covers."""
        self._shown += len(text)
        tokens: list[ShownToken] = []
        if final:
            self._waiting.extend((part, self._shown) for part in self._partial)
            self._partial.clear()
        while self._waiting:
            token, end = self._waiting[0]
            # A token cut by a stop string has shown its beginning; one that starts where the text was cut, nothing.
            cut = self.stop_string is not None and token.offset < self._shown
            if not (final or end <= self._shown or cut):
                break
            tokens.append(token)
            self._waiting.popleft()
        return Piece(text, tuple(tokens))
