"""The hash chain that names the content of a KV block.

A block's name is the digest of its parent's name and its own tokens, so equal names mean equal whole prefixes. The
chain starts from the namespace (weights, tokenizer, dtype, layout, adapter) and the request's salt: neither new weights
under an old name nor another tenant's salt can ever reach old blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def chain_root(namespace: str, salt: str) -> bytes:
    """Name of the empty prefix. The length keeps ("ab", "c") and ("a", "bc") apart."""
    space = namespace.encode()
    return sha256(b"%d:" % len(space) + space + salt.encode()).digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append the names of the full blocks of `tokens` until the chain has `num_blocks` of them."""
    parent = chain[-1] if chain else root
    for block in range(len(chain), num_blocks):
        content = array("I", tokens[block * block_size : (block + 1) * block_size])
        parent = sha256(parent + content.tobytes()).digest()
        chain.append(parent)
