"""Logprobs of tokens under raw logits, for the tokens of an output and of a prompt alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.step import TokenLogprob

# Logits worked on at once, in 64 bits: what stays in a CPU's cache (2 MiB), or a bearable 128 MiB elsewhere.
_CPU_CHUNK, _CHUNK = 1 << 18, 1 << 24


def rows_at_once(logits: Tensor) -> int:
    """How many rows of logits [rows, vocab] to work on together."""
    return max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _CHUNK) // logits.shape[1])


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Logprob, rank and the `tops[i]` most likely alternatives of `tokens[i]` under `logits[i]` ([n, vocab], float32).

    Prompt logprobs are the same question: row i holds the logits after prompt token i and is asked about token i + 1.
    Tokens of equal logit rank by id, so that ranks, alternatives and the greedy choice agree.
    """
    answers: list[TokenLogprob] = []
    size = rows_at_once(logits)
    for start in range(0, len(tokens), size):
        part = slice(start, start + size)
        answers += _token_logprobs(logits[part], tokens[part], tops[part])
    return answers


def _token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    vocab = logits.shape[1]
    key = _total_order(logits)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    norm = logits.logsumexp(dim=-1, keepdim=True)
    ranks = (key > key.gather(1, chosen)).sum(dim=-1).add_(1).tolist()
    values = (logits.gather(1, chosen) - norm)[:, 0].tolist()
    width = min(max(tops), vocab)
    ids = vocab - 1 - (key.topk(width, dim=-1).values & 0xFFFFFFFF)
    top_ids, top_values = ids.tolist(), (logits.gather(1, ids) - norm).tolist()
    return [
        TokenLogprob(token, value, rank, tuple(zip(some_ids[:top], some_values[:top], strict=True)))
        for token, value, rank, top, some_ids, some_values in zip(
            tokens, values, ranks, tops, top_ids, top_values, strict=True
        )
    ]


def _total_order(logits: Tensor) -> Tensor:
    """One int64 for each logit, ordered by the logit and, among equals, against the id: no two are the same."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of floats as integers of the same order
    vocab = logits.shape[1]
    return (rising.to(torch.int64) << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
