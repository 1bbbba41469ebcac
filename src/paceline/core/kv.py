"""KV accounting: how many blocks each request holds and which it shares.

Nothing here touches memory. A block is a number; the backend owns what the number stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.blocks import BlockPool
from paceline.core.prefix import chain_root, extend_chain
from paceline.core.request import Request


class KVCache:
    """Gives requests their blocks, and finds blocks that already hold what they need."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool, namespace: str) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_caching = prefix_caching
        self._namespace = namespace
        self._root = chain_root(namespace, "")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def lookup(self, request: Request) -> list[int]:
        """The longest run of blocks that already hold the start of the request's tokens.

        Never covers the last known token: its logits are needed, so it must be computed. A request that wants prompt
        logprobs needs the logits of every prompt token and gets no hit.
        """
        if not self._prefix_caching or request.spec.sampling.prompt_logprobs is not None:
            return []
        most = (request.known - 1) // self.block_size
        self._extend_hashes(request, most)
        hits = []
        for name in request.hashes[:most]:
            block = self.pool.find(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def blocks_needed(self, hits: list[int], tokens: int) -> int:
        """Available blocks that a request sharing `hits` would use up to hold `tokens` tokens in all.

        A hit that nobody refers to counts: sharing it takes it out of those available.
        """
        return self.blocks_for(tokens) - len(hits) + sum(map(self.pool.is_free, hits))

    def open(self, request: Request, hits: list[int]) -> None:
        """Start the request's block table with shared blocks; their tokens count as computed."""
        assert not request.blocks
        for block in hits:
            self.pool.share(block)
        request.blocks.extend(hits)
        request.capacity = len(hits) * self.block_size
        request.planned = request.computed = request.capacity
        # A first block that can enter the index is full one block later; without caching never.
        request.register_at = request.capacity + self.block_size if self._prefix_caching else request.limit + 1

    def extend(self, request: Request, tokens: int) -> tuple[int, ...] | None:
        """Blocks added so that the request can hold `tokens` tokens; None (and no change) if there are too few."""
        blocks = self.pool.take(self.blocks_for(tokens) - len(request.blocks))
        if blocks is None:
            return None
        request.blocks.extend(blocks)
        request.capacity += len(blocks) * self.block_size
        return tuple(blocks)

    def register(self, request: Request) -> None:
        """Put the request's full blocks in the index, as far as their tokens are known and planned.

        Called while planning: a later row of the same step may already share them, because a backend writes the KV of
        all rows of a layer before it reads any.
        """
        full = min(request.planned, request.known) // self.block_size
        first = request.register_at // self.block_size - 1
        self._extend_hashes(request, full)
        for block in range(first, full):
            self.pool.name(request.blocks[block], request.hashes[block])
        request.register_at = (full + 1) * self.block_size

    def close(self, request: Request, *, forget: bool = False) -> None:
        """Take back all of the request's blocks. With `forget`, nothing they hold is found again."""
        self.pool.put_back(request.blocks, forget=forget)
        request.blocks.clear()
        request.capacity = 0

    def held(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens the prefix index finds, in whole blocks."""
        found = 0
        for name in self._names(tokens, salt):
            if self.pool.find(name) is None:
                break
            found += 1
        return found * self.block_size

    def adopt(self, tokens: Sequence[int], salt: str = "") -> int:
        """Take in the full blocks of `tokens`, whose KV came from elsewhere: another engine, or a slower tier.

        They are cached afterwards, not held, and the most recently used. Returns how many leading tokens are: fewer
        than asked where too few blocks are available.
        """
        blocks: list[int] = []
        for name in self._names(tokens, salt):
            block = self.pool.find(name)
            if block is not None:
                self.pool.share(block)  # for the moment, so that the next `take` does not evict it
            else:
                taken = self.pool.take(1)
                if taken is None:
                    break
                block = taken[0]
                self.pool.name(block, name)
            blocks.append(block)
        self.pool.put_back(blocks)
        return len(blocks) * self.block_size

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that blocks are conserved over these (all live) requests."""
        self.pool.check_integrity(request.blocks for request in requests)

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        if len(request.hashes) < num_blocks:
            salt = request.spec.cache_salt
            root = chain_root(self._namespace, salt) if salt else self._root
            extend_chain(request.hashes, root, request.tokens, self.block_size, num_blocks)

    def _names(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        chain: list[bytes] = []
        if self._prefix_caching:
            root = chain_root(self._namespace, salt) if salt else self._root
            extend_chain(chain, root, tokens, self.block_size, len(tokens) // self.block_size)
        return chain
