// Linear maps, third part: rectangles of blocks and panels, and what happens to a tile on its way to y. After tiles.h.
#pragma once

PACELINE_INLINE Floats with_bias(const LinearJob& job, const float* tile, Index at, Index channel) {
  const Floats x = load(tile + at);
  return job.bias ? add(x, load(job.bias + channel)) : x;
}

// Bias, activation, gate and residual of a tile on its way to y. `up` is null unless the map is gated.
void finish(const LinearJob& job, const float* tile, const float* up, Block block, Index panel) {
  const Index column = (up ? panel / 2 : panel) * kPanel;
  for (Index r = 0; r < block.rows; ++r) {
    float* y = job.y + (block.low + r) * job.y_stride;
    const float* residual = job.residual ? job.residual + (block.low + r) * job.residual_stride : nullptr;
    for (Index v = 0; v < kPanel && column + v < job.outputs; v += kWidth) {
      const Index inside = job.outputs - column - v;
      const Index at = r * kPanel + v;
      Floats value = activate(with_bias(job, tile, at, panel * kPanel + v), job.activation);
      if (up) value = mul(value, with_bias(job, up, at, (panel + 1) * kPanel + v));
      if (residual) value = add(value, load_first(residual + column + v, inside));
      store_first(y + column + v, value, inside);
    }
  }
}

using Tile = void (*)(const LinearJob&, const uint8_t* prepared, const uint8_t* panel, Place, Part, float* tile);

// Tables by the number of rows: [0] is for one row.
#define PACELINE_4_ROWS(tile, ...) tile<1 __VA_ARGS__>, tile<2 __VA_ARGS__>, tile<3 __VA_ARGS__>, tile<4 __VA_ARGS__>
#define PACELINE_6_ROWS(tile, ...) PACELINE_4_ROWS(tile, __VA_ARGS__), tile<5 __VA_ARGS__>, tile<6 __VA_ARGS__>
#define PACELINE_8_ROWS(tile, ...) PACELINE_6_ROWS(tile, __VA_ARGS__), tile<7 __VA_ARGS__>, tile<8 __VA_ARGS__>
#define PACELINE_12_ROWS(tile, ...)                                                                    \
  PACELINE_8_ROWS(tile, __VA_ARGS__), tile<9 __VA_ARGS__>, tile<10 __VA_ARGS__>, tile<11 __VA_ARGS__>, \
      tile<12 __VA_ARGS__>
#if defined(__AVX512F__)
#define PACELINE_FLOAT_ROWS PACELINE_12_ROWS
#define PACELINE_INT8_ROWS PACELINE_8_ROWS
#define PACELINE_INT4_ROWS PACELINE_6_ROWS
#else
#define PACELINE_FLOAT_ROWS PACELINE_6_ROWS
#if PACELINE_VNNI
#define PACELINE_INT8_ROWS PACELINE_6_ROWS
#else
#define PACELINE_INT8_ROWS PACELINE_4_ROWS
#endif
#define PACELINE_INT4_ROWS PACELINE_4_ROWS
#endif
#define PACELINE_COMMA ,
constexpr Tile kFloat32Tiles[kFloatRows] = {PACELINE_FLOAT_ROWS(tile_floats, PACELINE_COMMA float)};
constexpr Tile kBFloat16Tiles[kFloatRows] = {PACELINE_FLOAT_ROWS(tile_floats, PACELINE_COMMA uint16_t)};
constexpr Tile kInt8Tiles[kInt8Rows] = {PACELINE_INT8_ROWS(tile_int8, )};
constexpr Tile kInt4Tiles[kInt4Rows] = {PACELINE_INT4_ROWS(tile_int4, PACELINE_COMMA false)};
constexpr Tile kInt4MinimumTiles[kInt4Rows] = {PACELINE_INT4_ROWS(tile_int4, PACELINE_COMMA true)};

int64_t block_rows(WeightKind kind) {
  switch (kind) {
    case WeightKind::kFloat32:
    case WeightKind::kBFloat16: return kFloatRows;
    case WeightKind::kInt8: return kInt8Rows;
    case WeightKind::kInt4: break;
  }
  return kInt4Rows;
}

PACELINE_INLINE const Tile* tiles_of(const LinearJob& job) {
  switch (job.kind) {
    case WeightKind::kFloat32: return kFloat32Tiles;
    case WeightKind::kBFloat16: return kBFloat16Tiles;
    case WeightKind::kInt8: return kInt8Tiles;
    case WeightKind::kInt4: break;
  }
  return job.has_minimum ? kInt4MinimumTiles : kInt4Tiles;
}

// Rows and panels of float weights are taken this many inputs at a time, so that what many blocks read again stays in
// the first-level cache. Integer ones are a quarter of the size. The parts are the same for one block: so are the sums.
constexpr Index kPartInputs = 256;
constexpr Index kBlocksAtOnce = 16;

// Of several blocks the first alone would wait for memory, which then does nothing while the others multiply: each of
// the first two asks for half of the next panel instead. (One block alone reads straight on, which the processor
// foresees. Without AVX-512 `ask_ahead` asks.)
#if defined(__AVX512F__)
constexpr bool kAsksForNext = true;
#else
constexpr bool kAsksForNext = false;
#endif

// Tiles of blocks [low, low + count) for one panel, into tiles [count][kMostRows * kPanel].
void compute_tiles(const LinearJob& job, Index low, Index count, Index panel, float* tiles) {
  const Tile* kinds = tiles_of(job);
  const bool floats = job.kind == WeightKind::kFloat32 || job.kind == WeightKind::kBFloat16;
  const uint8_t* weight = job.weight + panel * job.panel_bytes;
  const Index part = floats ? kPartInputs : job.depth;
  // The last block of a part asks for the next part. One block alone reads straight on, which the processor foresees.
  const Index ahead = count > 1 ? part * kPanel * (job.kind == WeightKind::kFloat32 ? 4 : 2) : 0;
  const bool asks = kAsksForNext && !floats && count > 1 && panel + 1 < job.panels;
  for (Index k = 0; k < job.depth; k += part) {
    for (Index i = 0; i < count; ++i) {
      const Block block = block_of(job, low + i);
      const uint8_t* prepared = job.prepared + block.low * row_bytes(job);
      if (floats && block.rows == 1) prepared = reinterpret_cast<const uint8_t*>(job.x + block.low * job.x_stride);
      const uint8_t* next = asks && i < 2 ? weight + job.panel_bytes + i * (job.panel_bytes / 2) : nullptr;
      const Part inputs{k, k + part < job.depth ? k + part : job.depth, i + 1 < count ? 0 : ahead, next};
      kinds[block.rows - 1](job, prepared, weight, {block.low, panel * kPanel}, inputs, tiles + i * kMostRows * kPanel);
    }
  }
}

void multiply(const LinearJob& job, int64_t block_low, int64_t block_high, int64_t panel_low, int64_t panel_high) {
  constexpr Index kTile = kMostRows * kPanel;
  alignas(64) float tiles[kBlocksAtOnce * kTile], ups[kBlocksAtOnce * kTile];
  for (Index p = panel_low; p < panel_high; p += job.gated ? 2 : 1) {
    for (Index b = block_low; b < block_high; b += kBlocksAtOnce) {
      const Index count = block_high - b < kBlocksAtOnce ? block_high - b : kBlocksAtOnce;
      compute_tiles(job, b, count, p, tiles);
      if (job.gated) compute_tiles(job, b, count, p + 1, ups);
      for (Index i = 0; i < count; ++i) {
        finish(job, tiles + i * kTile, job.gated ? ups + i * kTile : nullptr, block_of(job, b + i), p);
      }
    }
  }
}
