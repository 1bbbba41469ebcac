"""Physical KV blocks: who holds them, which are free, which still remember a prefix.

Every block is in exactly one of three places, and `check_integrity` holds us to it:

    held    some requests refer to it (reference count > 0)
    cached  nobody refers to it, but the prefix index can still find its content; least recently used first
    blank   nobody refers to it and it has no content worth keeping
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks with an index from content name to block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block on top
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that the prefix index can still find."""
        return len(self._cached)

    def find(self, name: bytes) -> int | None:
        """The block with this content, held or cached."""
        return self._index.get(name)

    def is_free(self, block: int) -> bool:
        """Whether nobody refers to the block, so that sharing it would use up an available one."""
        return self._refs[block] == 0

    def is_sole(self, block: int) -> bool:
        """Whether one request alone refers to the block, so that it becomes available when that one lets go."""
        return self._refs[block] == 1

    def share(self, block: int) -> None:
        """One more reference to a block that `find` gave."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) when there are not as many.

        Blank blocks go first; then the least recently used cached ones forget their content.
        """
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def put_back(self, blocks: list[int], *, forget: bool = False) -> None:
        """Drop one reference to each, deepest block first, so that eviction takes a chain from its end.

        With `forget`, their content is not to be found again (it may be wrong).
        """
        for block in reversed(blocks):
            if forget and self._names[block] is not None:
                self._forget(block)
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._names[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def name(self, block: int, name: bytes) -> None:
        """Make a held block findable. If another block has that content already, this one stays nameless."""
        if self._names[block] is None and name not in self._index:
            self._names[block] = name
            self._index[name] = block

    def clear_cache(self) -> None:
        """Forget the content of every unreferenced block."""
        while self._cached:
            block, _ = self._cached.popitem()
            self._forget(block)
            self._blank.append(block)

    def _forget(self, block: int) -> None:
        name = self._names[block]
        assert name is not None
        del self._index[name]
        self._names[block] = None

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Assert blank + cached + held == total, and that reference counts are what the holders' tables say."""
        refs = [0] * self.num_blocks
        for table in holders:
            assert len(set(table)) == len(table), f"a block occurs twice in one table: {table}"
            for block in table:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        blank, cached = set(self._blank), set(self._cached)
        held = {block for block, count in enumerate(refs) if count}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert blank | cached | held == set(range(self.num_blocks)), "a block is nowhere"
        assert len(blank) + len(cached) + len(held) == self.num_blocks, "a block is in two places"
        assert {block for block, name in enumerate(self._names) if name is not None} == set(self._index.values())
        assert all(self._names[block] == name for name, block in self._index.items())
        assert all(self._names[block] is not None for block in cached), "a cached block has no name"
        assert all(self._names[block] is None for block in blank), "a blank block has a name"
