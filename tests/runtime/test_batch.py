"""Packing rows into a batch, against the definition of each field."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.batch import build_batch

Row = tuple[int, int, int]  # start, count, logits wanted


@st.composite
def rows_of(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.just(1) | st.integers(1, 9))
        rows.append((draw(st.integers(0, 20)), count, draw(st.integers(0, count))))
    return rows


@settings(deadline=None)
@given(rows_of(), st.sampled_from([1, 3, 4]), st.randoms(use_true_random=False))
def test_every_field(rows: list[Row], block_size: int, random: object) -> None:
    shuffle = np.random.default_rng(random.randrange(99))  # type: ignore[attr-defined]
    table_rows = shuffle.permutation(len(rows) + 2)[: len(rows)]
    tokens = shuffle.integers(0, 1000, (len(rows) + 2, 32)).astype(np.int32)
    tables = shuffle.permutation((len(rows) + 2) * 32).reshape(len(rows) + 2, 32).astype(np.int32)
    starts, counts, wanted = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    batch = build_batch(tokens, tables, table_rows, starts, counts, wanted, block_size=block_size)

    order = sorted(range(len(rows)), key=lambda i: rows[i][1] > 1)  # stable: decodes first
    assert batch.num_rows == len(rows)
    assert batch.num_tokens == counts.sum()
    assert batch.num_decodes == sum(count == 1 for _, count, _ in rows)
    assert batch.context_lens == tuple(rows[i][0] + rows[i][1] for i in order)
    where = {}  # (row, position) -> index among tokens
    for r, i in enumerate(order):
        start, count, _ = rows[i]
        assert batch.row_starts[r + 1] - batch.row_starts[r] == count
        held = -(-(start + count) // block_size)
        assert batch.block_tables[r, :held].tolist() == tables[table_rows[i], :held].tolist()
        for k in range(count):
            at, position = batch.row_starts[r] + k, start + k
            where[i, position] = at
            assert batch.positions[at] == position
            assert batch.token_ids[at] == tokens[table_rows[i], position]
            block = int(tables[table_rows[i], position // block_size])
            assert batch.slot_mapping[at] == block * block_size + position % block_size
    assert batch.logit_rows.tolist() == [
        where[i, position]
        for i, (start, count, n) in enumerate(rows)
        for position in range(start + count - n, start + count)
    ]
