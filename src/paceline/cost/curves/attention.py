"""Attention over a KV cache: reading it for decodes, multiplying with it for prefills, writing it.

Decode. A query reads its row's keys and values once; a multiprocessor takes one row and KV head, or one piece of it
where rows are few. Each takes a fixed time to set up; memory runs at full speed only when enough of them read; pieces
must be put together. Kernels differ in how many pieces they make:

- FlashAttention 2 fills the multiprocessors with pieces of at least 128 keys, but only where query heads share keys
  (it then treats them as rows of one matrix); bringing the queries of several rows into that order is a copy;
- FlashAttention 3 under CUDA graphs plans at most 32 pieces for the batch, and 2 for each row: one KV head on a chip
  (a large tensor-parallel degree) leaves three quarters of the multiprocessors idle.

Prefill. A multiprocessor takes 128 queries of one head and walks over their keys in blocks of 128, the block on the
diagonal in full; rows and heads come in waves, and a step is not over before its longest walk is. Queries and outputs
move through memory beside that, and a kernel of its own writes the new keys and values: one block of threads for each
token, as many at once as threads fit on the chip, so that narrow KV heads write no faster than wide ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cost.curves.timing import NOTHING, KernelTime, slower

PIECE = 128  # keys that a piece has at least
BLOCK = 128  # queries and keys of a tile
GRAIN = 16  # rows of queries that the matrix units take at a time
THREADS = 2048  # resident on a multiprocessor
WRITERS = 512  # threads of a block that writes one token, at most
NUMBER = 2.0  # bytes of a query or output


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Constants of a family's decode attention."""

    floor_s: float = 11.0e-6  # launch, plan, cache write, merge
    row_s: float = 3.4e-6  # set-up of one row and KV head on one multiprocessor
    share: float = 0.85  # of the bandwidth, when enough multiprocessors read
    reach: float = 0.80  # share of the multiprocessors that must read for that
    pieces: int = 0  # in the whole batch; 0: as many as there are multiprocessors
    split_s: float = 0.0  # putting pieces together,
    piece_s: float = 0.2e-6  # and for each of a row's pieces
    regroup_s: float = 0.0  # copy of queries that share KV heads, where rows are several
    split_alone: bool = True  # rows are cut up where every query head has keys of its own, too
    peak_share: float = 0.50  # of the matrix units

    def time(
        self,
        rows: int,
        context: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_bytes: float,
        latent: bool,
        peak: float,
        bandwidth: float,
        sms: int,
    ) -> KernelTime:
        """One query a row against `context` positions over all rows; `kv_bytes` for each number kept."""
        if rows <= 0:
            return NOTHING
        works = rows * kv_heads
        pieces = self._pieces(rows, works, context / rows, grouped=heads > kv_heads, latent=latent, sms=sms)
        reading = min(1.0, works * pieces / (sms * self.reach))
        moved = context * kv_heads * head_dim * kv_bytes * (1.0 if latent else 2.0)
        memory_s = moved / (bandwidth * self.share * reading)
        group = -(-heads // (kv_heads * GRAIN)) * GRAIN
        compute_s = 4.0 * context * kv_heads * group * head_dim / (peak * self.peak_share)
        fixed_s = self.floor_s + self.row_s * works / sms
        if pieces > 1:
            fixed_s += self.split_s + self.piece_s * pieces
        if heads > kv_heads > 1 and rows > 1:
            fixed_s += self.regroup_s
        return slower(fixed_s, compute_s, memory_s)

    def _pieces(self, rows: int, works: int, length: float, *, grouped: bool, latent: bool, sms: int) -> float:
        """Pieces that each row and KV head is cut into."""
        if works >= sms or not (grouped or self.split_alone):
            return 1
        most = max(1.0, length / PIECE)
        if self.pieces and not latent:
            return min(most, max(2.0, self.pieces / rows))
        return min(most, max(1, sms // works))


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Constants of a family's prefill attention."""

    floor_s: float = 9.0e-6
    share: float = 0.60  # of the matrix units in the inner loop; the softmax between two multiplies keeps it low
    tile_s: float = 1.0e-6  # first loads and last stores of a tile of queries
    stream_share: float = 0.80  # of the bandwidth, for queries and outputs
    token_s: float = 4.5e-6  # one block of threads that writes a token's keys and values
    write_share: float = 0.65  # of the bandwidth, when many write

    def time(
        self,
        rows: int,
        tokens: int,
        pairs: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        peak: float,
        bandwidth: float,
        sms: int,
    ) -> KernelTime:
        """`rows` alike, `tokens` queries and `pairs` query-key pairs in all; keys before a row's first are cached."""
        if rows <= 0 or tokens <= 0:
            return NOTHING
        length = tokens / rows
        before = max(0.0, pairs / tokens - (length + 1.0) / 2.0)
        tiles = -(-length // BLOCK)
        high = min(BLOCK, -(-length // GRAIN) * GRAIN)  # queries of a tile
        wide = min(BLOCK, -(-(before + length) // GRAIN) * GRAIN)  # keys of a block
        block_s = 4.0 * high * wide * head_dim * sms / (peak * self.share)
        blocks = tiles * before / BLOCK + tiles * (tiles + 1.0) / 2.0
        total_s = rows * heads * (blocks * block_s + tiles * self.tile_s) / sms
        longest_s = (before / BLOCK + tiles) * block_s + self.tile_s
        compute_s = max(total_s, longest_s)
        stream_s = 2.0 * tokens * heads * head_dim * NUMBER / (bandwidth * self.stream_share)
        threads = min(kv_heads * head_dim, WRITERS)
        write_s = max(
            tokens * threads / (sms * THREADS) * self.token_s,
            tokens * kv_heads * head_dim * 4.0 * NUMBER / (bandwidth * self.write_share),
        )
        seconds = self.floor_s + compute_s + stream_s + write_s
        if self.floor_s > max(compute_s, stream_s + write_s):
            return KernelTime(seconds, "latency")
        return KernelTime(seconds, "compute" if compute_s > stream_s + write_s else "memory")
