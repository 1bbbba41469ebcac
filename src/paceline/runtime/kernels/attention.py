"""Attention of a ragged batch over the paged pool, in torch: the reference that other kernels are compared with.

Decodes and chunks go different ways. Decodes (one query a row) are gathered into a few dense batches of rows of
similar context; each chunk attends on its own. Both keep the heads that share a key together instead of repeating
keys and values, and derive index tensors and masks once a step, not once a layer (`RaggedBatch.memo`).

The pool may keep keys and values in another type than queries have. What is gathered becomes theirs, and every query
sees keys and values as the pool keeps them, its own included: else results would depend on how a prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool

# Queries of a chunk are taken this many at a time; fewer where tile x context would exceed BIAS_ELEMENTS.
QUERY_TILE = 512
BIAS_ELEMENTS = 1 << 23
# Padded keys, summed over rows, that cost about as much as calling attention once more.
SPLIT_WASTE = 256
# Decodes are gathered on a CPU in groups of this many bytes of keys and values, which then are read from its cache.
GROUP_BYTES = 4 << 20  # in the type of the queries


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: KVPool,
    layer: int,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write k [T, KH, Dk] and v [T, KH, Dv] into `layer` of the pool, then attend: q [T, H, Dk] -> [T, H, Dv].

    Causal; H is a multiple of KH, and query heads h * H // KH onward share key head h. All rows are written before any
    attends, so rows of one step may share blocks that it fills.

    scale    multiplies q . k
    window   a query sees this many positions, its own included; None is all before it
    softcap  scores become softcap * tanh(score / softcap)
    sinks    [H] a logit of each head that takes part in the softmax and carries no value
    """
    pool.write(layer, batch.slot_mapping, k, v)
    kv_heads = pool.specs[layer].kv_heads
    terms = _Terms(scale, softcap, None if sinks is None else sinks.view(kv_heads, -1))
    # The G query heads of one key head lie together: [T, KH, G, D].
    grouped = q.unflatten(1, (kv_heads, -1))
    out = q.new_empty(*grouped.shape[:3], pool.specs[layer].v_dim)
    layout = _layout(batch, pool, layer, window, q.dtype)
    for group in layout.decodes:
        k_rows, v_rows = layout.gather(pool, layer, group.blocks)
        k_rows = k_rows.unflatten(0, (group.rows, -1))[:, : group.length].transpose(1, 2)  # [R, KH, S, D]
        v_rows = v_rows.unflatten(0, (group.rows, -1))[:, : group.length].transpose(1, 2)
        out[group.tokens] = _attend_decodes(grouped[group.tokens], k_rows, v_rows, group.bias, terms)
    for chunk in layout.chunks:
        if chunk.blocks is None:
            k_row, v_row = k[chunk.tokens], v[chunk.tokens]  # [S, KH, D]
        else:
            k_row, v_row = layout.gather(pool, layer, chunk.blocks)
        queries, target = grouped[chunk.tokens], out[chunk.tokens]
        for tile in chunk.tiles:
            bias = None if tile.square else layout.corner(tile)
            target[tile.queries] = _attend_tile(queries[tile.queries], k_row[tile.keys], v_row[tile.keys], bias, terms)
    return out.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What enters the scores beside q . k; the same for every row."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [KH, G]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows of one query each, ascending, whose contexts are padded to `length` keys."""

    tokens: slice | Tensor  # their places in [T] tensors
    rows: int
    blocks: Tensor  # [rows * blocks a row]
    length: int
    bias: Tensor | None  # [rows, 1, 1, length], 0 or -inf; None where every key counts


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a chunk and the keys that any of them sees; both slices count within the chunk's own tensors.

    The last query is at the position of the last key.
    """

    queries: slice
    keys: slice
    square: bool  # as many keys as queries, and each query sees all up to its own


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several queries."""

    tokens: slice  # its place in [T] tensors
    blocks: Tensor | None  # of its context; None where that is the chunk itself, as it was computed
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How attention walks a batch, and the memory it gathers into: one piece that every group and layer reuses."""

    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]
    bias: Tensor | None  # [queries, keys] of the largest tile, 0 or -inf; None where no tile needs one
    dtype: torch.dtype  # of queries
    workspace: dict[tuple[str, torch.Size, torch.dtype], Tensor]

    def corner(self, tile: _Tile) -> Tensor:
        """The bias of a tile: what a query sees counts back from its own key, so it is the last rows and columns."""
        assert self.bias is not None
        rows, columns = self.bias.shape
        queries, keys = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        return self.bias[rows - queries :, columns - keys :]

    def gather(self, pool: KVPool, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks, [len(blocks) * block_size, KH, D] each, until the next call."""
        return (
            self._gather(pool.keys[layer], pool.key_scales[layer], blocks, "k"),
            self._gather(pool.values[layer], pool.value_scales[layer], blocks, "v"),
        )

    def _gather(self, paged: Tensor, scales: Tensor | None, blocks: Tensor, use: str) -> Tensor:
        rows = self._space(paged, paged.dtype, len(blocks), use)
        torch.index_select(paged, 0, blocks, out=rows)
        if paged.dtype != self.dtype:
            kept, rows = rows, self._space(paged, self.dtype, len(blocks), use)
            if scales is None:
                rows.copy_(kept)
            else:
                torch.mul(kept, scales[blocks][..., None], out=rows)
        return rows.flatten(0, 1)

    def _space(self, paged: Tensor, dtype: torch.dtype, count: int, use: str) -> Tensor:
        """Memory for `count` blocks of that type."""
        key = (use, paged.shape, dtype)
        space = self.workspace.get(key)
        if space is None:
            gathered = [group.blocks for group in self.decodes] + [
                c.blocks for c in self.chunks if c.blocks is not None
            ]
            space = self.workspace[key] = paged.new_empty(max(map(len, gathered)), *paged.shape[1:], dtype=dtype)
        return space[:count]


def _layout(batch: RaggedBatch, pool: KVPool, layer: int, window: int | None, dtype: torch.dtype) -> _Layout:
    """The layout for this layer; made once a step for each window and token size that the model has."""
    token_bytes = pool.specs[layer].bytes_per_token(dtype)
    key = ("attention", window, token_bytes)
    layout: _Layout | None = batch.memo.get(key)
    if layout is None:
        most_keys = GROUP_BYTES // token_bytes if pool.device.type == "cpu" else None
        groups = _split_decodes(batch, window, most_keys)
        longest = max(batch.context_lens[batch.num_decodes :], default=1)
        tile = min(QUERY_TILE, max(16, BIAS_ELEMENTS // longest))
        rounded = pool.dtype != dtype
        chunks = tuple(
            _chunk(batch, row, pool.block_size, window, tile, rounded)
            for row in range(batch.num_decodes, batch.num_rows)
        )
        layout = _Layout(
            tuple(_decode_group(batch, rows, pool.block_size, window, dtype) for rows in groups),
            chunks,
            _largest_bias(chunks, window, pool.device, dtype),
            dtype,
            {},
        )
        batch.memo[key] = layout
    return layout


def _split_decodes(batch: RaggedBatch, window: int | None, most_keys: int | None) -> list[list[int]]:
    """Decode rows in groups of similar context, so that padding at most doubles what is read.

    A few short rows beside a long one are not worth a group of their own (SPLIT_WASTE). No group has more than
    `most_keys` keys, padding counted, unless a row alone does.
    """
    spans = [c if window is None else min(c, window) for c in batch.context_lens[: batch.num_decodes]]
    rows = sorted(range(batch.num_decodes), key=spans.__getitem__, reverse=True)
    groups: list[list[int]] = []
    while rows:
        longest = spans[rows[0]]
        size = len(rows) if most_keys is None else min(len(rows), max(1, most_keys // longest))
        short = next((i for i in range(size) if 2 * spans[rows[i]] < longest), size)
        if sum(longest - spans[r] for r in rows[short:size]) >= SPLIT_WASTE:
            size = short
        groups.append(sorted(rows[:size]))
        rows = rows[size:]
    return groups


def _decode_group(
    batch: RaggedBatch, rows: list[int], block_size: int, window: int | None, dtype: torch.dtype
) -> _DecodeGroup:
    device = batch.positions.device
    contexts = [batch.context_lens[r] for r in rows]
    # Each row starts at the block of its oldest visible key.
    first_blocks = [0 if window is None else max(0, c - window) // block_size for c in contexts]
    spans = [c - f * block_size for c, f in zip(contexts, first_blocks, strict=True)]
    length = max(spans)
    width = -(-length // block_size)
    neighbours = rows[-1] - rows[0] + 1 == len(rows)
    tokens = slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows, device=device)
    tables = batch.block_tables[tokens]
    if any(first_blocks):
        columns = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(width, device=device)
        # A row that ends early reads its last column again; the bias hides it.
        blocks = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
    else:
        blocks = tables[:, :width]
    bias = None
    lowest = [
        0 if window is None else max(0, c - window) - f * block_size
        for c, f in zip(contexts, first_blocks, strict=True)
    ]
    if any(lowest) or min(spans) < length:
        at = torch.arange(length, device=device)
        limits = torch.tensor([lowest, spans], device=device)[..., None]  # [2, rows, 1]
        bias = _bias((at >= limits[0]) & (at < limits[1]), dtype)[:, None, None]
    return _DecodeGroup(tokens, len(rows), blocks.flatten(), length, bias)


def _chunk(batch: RaggedBatch, row: int, block_size: int, window: int | None, tile: int, rounded: bool) -> _Chunk:
    """`rounded`: the pool keeps something else than was computed, so a row's own keys come from there too."""
    tokens = slice(batch.row_starts[row], batch.row_starts[row + 1])
    count, context = tokens.stop - tokens.start, batch.context_lens[row]
    start = context - count  # position of the first query
    first_block = 0 if window is None else max(0, start + 1 - window) // block_size
    blocks = batch.block_tables[row, first_block : -(-context // block_size)] if start or rounded else None
    if start == 0 and (window is None or window >= count):
        return _Chunk(tokens, blocks, (_Tile(slice(0, count), slice(0, count), square=True),))
    origin = first_block * block_size  # position of the first key at hand
    tiles = []
    for low in range(0, count, tile):
        high = min(low + tile, count)
        oldest = 0 if window is None else max(0, start + low + 1 - window)
        keys = slice(oldest - origin, start + high - origin)
        tiles.append(_Tile(slice(low, high), keys, square=False))
    return _Chunk(tokens, blocks, tuple(tiles))


def _largest_bias(
    chunks: tuple[_Chunk, ...], window: int | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """A bias that holds that of every tile in its corner."""
    tiles = [tile for chunk in chunks for tile in chunk.tiles if not tile.square]
    if not tiles:
        return None
    queries = max(tile.queries.stop - tile.queries.start for tile in tiles)
    keys = max(tile.keys.stop - tile.keys.start for tile in tiles)
    at_q = torch.arange(keys - queries, keys, device=device)[:, None]
    at_k = torch.arange(keys, device=device)
    visible = at_k <= at_q
    if window is not None:
        visible &= at_k > at_q - window
    return _bias(visible, dtype)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _attend_decodes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, terms: _Terms) -> Tensor:
    """q [R, KH, G, Dk], k [R, KH, S, Dk], v [R, KH, S, Dv] -> [R, KH, G, Dv]. Query heads stand where queries would."""
    if terms.softcap is None and terms.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=terms.scale)
    sinks = None if terms.sinks is None else terms.sinks[..., None]
    return _weights(q @ k.transpose(2, 3), bias, sinks, terms) @ v


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, terms: _Terms) -> Tensor:
    """q [Q, KH, G, Dk], k [S, KH, Dk], v [S, KH, Dv] -> [Q, KH, G, Dv]. Key heads stand where the batch would."""
    queries, _, group, _ = q.shape
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [KH, S, D]
    if terms.softcap is None and terms.sinks is None:
        shared = (-1, group, -1, -1)  # a view: the heads of a group read the same keys
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k[:, None].expand(shared),
            v[:, None].expand(shared),
            attn_mask=bias,
            is_causal=bias is None,
            scale=terms.scale,
        )
        return out.permute(2, 0, 1, 3)
    if bias is None:
        bias = _bias(torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril_(), q.dtype)
    scores = (q.permute(1, 2, 0, 3).flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, (group, queries))
    sinks = None if terms.sinks is None else terms.sinks[..., None, None]
    weights = _weights(scores, bias, sinks, terms)  # [KH, G, Q, S]
    return (weights.flatten(1, 2) @ v).unflatten(1, (group, queries)).permute(2, 0, 1, 3)


def _weights(scores: Tensor, bias: Tensor | None, sinks: Tensor | None, terms: _Terms) -> Tensor:
    """Softmax of raw scores [..., S] over S, with `sinks` [..., 1] as one more key whose weight is dropped."""
    scores = scores * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    with_sink = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return with_sink.softmax(-1)[..., :-1]
