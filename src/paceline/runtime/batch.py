"""The input of one forward pass: all rows of a step, packed end to end without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """R rows of T tokens in all; row r owns tokens row_starts[r] to row_starts[r + 1] of every [T] tensor.

    Rows of one token (decodes) come first, then the longer ones (chunks of prompts), so that attention can treat the
    former as one dense batch. `logit_rows` undoes that order: logits come back in the order the caller gave the rows.
    Index tensors are int64 and live on the model's device; what steers Python loops is kept on the host.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T] position of each token in its sequence
    slot_mapping: Tensor  # [T] where each token's KV goes: block * block_size + offset
    block_tables: Tensor  # [R, max_blocks] padded with the pool's scratch block
    logit_rows: Tensor  # [S] indices into T of the tokens whose logits are wanted
    row_starts: tuple[int, ...]  # R + 1
    context_lens: tuple[int, ...]  # R; tokens of the row whose KV exists once this step's is written
    num_decodes: int  # rows 0 .. num_decodes - 1 have one token each
    # What attention derives from the fields above once a step and reuses in every layer (index tensors, masks).
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.row_starts[-1]


def build_batch(
    tokens: NDArray[Any],
    tables: NDArray[Any],
    rows: Ints,
    starts: Ints,
    counts: Ints,
    logit_counts: Ints,
    *,
    block_size: int,
    device: torch.device | str = "cpu",
) -> RaggedBatch:
    """Pack rows into a batch. All arguments but the first two have one entry a row.

    tokens        [N, max_len] known tokens of each sequence, by position
    tables        [N, max_blocks] block table of each sequence, padded with the pool's scratch block
    rows          which of the N sequences
    starts        first position to compute
    counts        tokens to compute, at least 1
    logit_counts  logits are wanted for this many of the row's last tokens
    """
    order = np.argsort(counts > 1, kind="stable")
    seqs, firsts, lengths = rows[order], starts[order], counts[order]
    row_starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=row_starts[1:])
    # One entry a token: its sequence and its position.
    token_seqs = np.repeat(seqs, lengths)
    positions = np.arange(row_starts[-1]) + np.repeat(firsts - row_starts[:-1], lengths)
    contexts = firsts + lengths
    max_blocks = -(-int(contexts.max()) // block_size)
    slots = tables[token_seqs, positions // block_size].astype(np.int64) * block_size + positions % block_size

    ends = np.empty_like(row_starts[1:])  # of each row in the caller's order
    ends[order] = row_starts[1:]
    logit_ends = np.cumsum(logit_counts)
    logit_rows = np.arange(logit_ends[-1]) + np.repeat(ends - logit_ends, logit_counts)

    def put(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)

    return RaggedBatch(
        token_ids=put(tokens[token_seqs, positions]),
        positions=put(positions),
        slot_mapping=put(slots),
        block_tables=put(tables[seqs, :max_blocks]),
        logit_rows=put(logit_rows),
        row_starts=tuple(row_starts.tolist()),
        context_lens=tuple(contexts.tolist()),
        num_decodes=int((lengths == 1).sum()),
    )


def batch_of(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    scratch_block: int,
    all_logits: bool = False,
    device: torch.device | str = "cpu",
) -> RaggedBatch:
    """A batch that computes every sequence from its start to its end; for tests, warm-up and scripts.

    Logits are those of each sequence's last token, or of every computed token with `all_logits`.
    """
    n = len(sequences)
    ends = np.array([len(s) for s in sequences], dtype=np.int64)
    counts = ends - np.asarray(starts, dtype=np.int64)
    tokens = np.zeros((n, int(ends.max())), dtype=np.int64)
    blocks = np.full((n, max(len(t) for t in tables)), scratch_block, dtype=np.int64)
    for i in range(n):
        tokens[i, : ends[i]] = sequences[i]
        blocks[i, : len(tables[i])] = tables[i]
    return build_batch(
        tokens,
        blocks,
        np.arange(n),
        np.asarray(starts, dtype=np.int64),
        counts,
        counts if all_logits else np.ones_like(counts),
        block_size=block_size,
        device=device,
    )
