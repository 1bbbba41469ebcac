"""What transformers would generate, and whether our tokens equal it.

Equal means token by token, except where transformers' two best logits lie within `TIE`: float noise decides there, and
either token is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TIE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """Transformers' greedy continuation of a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    # At each token: the runner-up where the two best logits lie within TIE, else None.
    rivals: tuple[int | None, ...]

    def first_difference(self, ours: Sequence[int], start: int = 0) -> tuple[int, bool] | None:
        """(index, whether it is a near tie) of the first token that differs; None if none does.

        `ours` continues the prompt and the first `start` of transformers' tokens.
        """
        for at, token in enumerate(ours, start):
            if token != self.tokens[at]:
                return at, token == self.rivals[at]
        return None


@dataclass
class Reference:
    """A transformers model whose greedy decoding is checked, not repeated.

    One forward over prompt and a guess gives its choice after every prefix of the guess. Choices hold up to the first
    that differs from the guess, and go on from transformers' choice there. A good guess (ours, if we are right) makes
    this one forward for each prompt; a bad one costs time and cannot change the result.
    """

    model: Any
    _known: dict[tuple[tuple[int, ...], int], Greedy] = field(default_factory=dict)

    def greedy(self, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> Greedy:
        """The first `count` tokens after `prompt`, whatever they are (an end-of-sequence token is one like others)."""
        key = (tuple(prompt), count)
        if key not in self._known:
            self._known[key] = self._decode(key[0], count, tuple(guess))
        return self._known[key]

    @torch.inference_mode()
    def _decode(self, prompt: tuple[int, ...], count: int, guess: tuple[int, ...]) -> Greedy:
        tokens: list[int] = []
        rivals: list[int | None] = []
        while len(tokens) < count:
            ahead = guess[len(tokens) : count - 1] if tuple(tokens) == guess[: len(tokens)] else ()
            asked = torch.tensor([[*prompt, *tokens, *ahead]])
            logits = self.model(asked, logits_to_keep=len(ahead) + 1, use_cache=False).logits[0]
            best = logits.topk(2, dim=-1)
            for at, (ids, values) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
                tokens.append(ids[0])
                rivals.append(ids[1] if values[0] - values[1] <= TIE else None)
                if at < len(ahead) and ids[0] != ahead[at]:
                    break
        return Greedy(prompt, tuple(tokens), tuple(rivals))
