"""The table of live sequences against plain lists, over arbitrary lives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.sequences import SequenceTable

PAD = 77


@settings(deadline=None)
@given(st.data())
def test_equals_lists(data: st.DataObject) -> None:
    """Rows are reused and arrays grow; what a row holds is its own, and all behind its blocks is padding."""
    table = SequenceTable(PAD, block_size=4)
    live: dict[int, tuple[list[int], list[int]]] = {}  # row -> (tokens, blocks)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "blocks", "blocks", "append", "remove"]))
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=300))
            cut = data.draw(st.integers(0, len(prompt)))
            row = table.add(prompt[:cut], prompt[cut:])
            assert row not in live
            live[row] = (prompt, [])
        elif live:
            row = data.draw(st.sampled_from(sorted(live)))
            if action == "remove":
                table.remove(row)
                del live[row]
            elif action == "blocks":
                blocks = data.draw(st.lists(st.integers(0, 70), max_size=90))
                table.add_blocks(row, blocks)
                live[row][1].extend(blocks)
            else:
                rows = sorted(live)
                table.append(np.array(rows), [row + 1000 for row in rows])
                for row in rows:
                    live[row][0].append(row + 1000)
        for row, (tokens, blocks) in live.items():
            assert table.tokens[row, : table.known[row]].tolist() == tokens
            assert table.blocks[row, : len(blocks)].tolist() == blocks
            assert (table.blocks[row, len(blocks) :] == PAD).all()
