"""What the backend keeps of each live request, in arrays that a step's tensors are cut from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SequenceTable:
    """Tokens and block tables of live sequences; a sequence is a row number, reused after `remove`.

    Arrays grow with the most sequences and the longest one seen, so a server with a long context costs nothing until
    somebody uses it.
    """

    def __init__(self, pad_block: int, block_size: int) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)  # [rows, positions]
        self.blocks: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)  # [rows, blocks], padded with pad_block
        self.known: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # tokens of each row
        self.held: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # blocks of each row
        self._pad_block = pad_block
        self._block_size = block_size
        self._free: list[int] = []

    def add(self, *parts: Sequence[int]) -> int:
        """A new sequence of these tokens (several parts are one sequence) and no blocks; its row."""
        length = sum(map(len, parts))
        if not self._free:
            self._reserve(rows=max(16, 2 * len(self.known)))
        if length >= self.tokens.shape[1]:
            self._reserve(positions=length + 1)
        row = self._free.pop()
        at = 0
        for part in parts:
            self.tokens[row, at : at + len(part)] = part
            at += len(part)
        self.known[row] = length
        return row

    def remove(self, row: int) -> None:
        """Forget a sequence."""
        self.blocks[row, : self.held[row]] = self._pad_block
        self.known[row] = self.held[row] = 0
        self._free.append(row)

    def add_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """Lengthen the row's block table."""
        held = int(self.held[row])
        if held + len(blocks) > self.blocks.shape[1]:
            self._reserve(positions=(held + len(blocks)) * self._block_size)
        self.blocks[row, held : held + len(blocks)] = blocks
        self.held[row] = held + len(blocks)

    def append(self, rows: NDArray[np.int64], tokens: Sequence[int]) -> None:
        """One more token for each of these (distinct) rows."""
        at = self.known[rows]
        if int(at.max()) >= self.tokens.shape[1]:
            self._reserve(positions=int(at.max()) + 1)
        self.tokens[rows, at] = tokens
        self.known[rows] = at + 1

    def _reserve(self, *, rows: int = 0, positions: int = 0) -> None:
        """Room for this many rows and positions; positions at least double when they grow."""
        old_rows, old_positions = self.tokens.shape
        rows = max(rows, old_rows)
        positions = old_positions if positions <= old_positions else max(256, positions, 2 * old_positions)
        num_blocks = -(-positions // self._block_size)
        tokens = np.zeros((rows, positions), dtype=np.int32)
        tokens[:old_rows, :old_positions] = self.tokens
        blocks = np.full((rows, num_blocks), self._pad_block, dtype=np.int32)
        blocks[:old_rows, : self.blocks.shape[1]] = self.blocks
        self.tokens, self.blocks = tokens, blocks
        if rows > old_rows:
            fresh = np.zeros(rows - old_rows, dtype=np.int64)
            self.known = np.concatenate([self.known, fresh])
            self.held = np.concatenate([self.held, fresh])
            self._free += range(rows - 1, old_rows - 1, -1)
