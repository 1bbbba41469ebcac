// Linear maps over packed weights: prepare a block of rows, multiply it with panels, finish the tile.
// Included inside `namespace paceline { namespace {` after vec.h.
#pragma once

constexpr Index kVectors = 2;
constexpr Index kPanel = kVectors * kWidth;
#if defined(__AVX512F__)
constexpr Index kFloatRows = 12;  // 24 sums of 32 registers
constexpr Index kInt8Rows = 8;
constexpr Index kInt4Rows = 6;  // more would spill: scales are in use beside the sums
#else
constexpr Index kFloatRows = 6;                     // 12 sums of 16 registers
constexpr Index kInt8Rows = PACELINE_VNNI ? 6 : 4;  // without VNNI, products need registers too
constexpr Index kInt4Rows = 4;
#endif
constexpr Index kMostRows = kFloatRows;
constexpr int kInt8Offset = PACELINE_VNNI ? 128 : 0;  // added to stored weights

struct Block {
  Index low, rows;
};

PACELINE_INLINE Block block_of(const LinearJob& job, Index block) {
  const Index low = block * job.rows / job.blocks;
  return {low, (block + 1) * job.rows / job.blocks - low};
}

// Bytes of a prepared row.
PACELINE_INLINE Index row_bytes(const LinearJob& job) {
  const bool floats = job.kind == WeightKind::kFloat32 || job.kind == WeightKind::kBFloat16;
  return job.depth * (floats ? static_cast<Index>(sizeof(float)) : 1);
}

// ---------------------------------------------------------------------------------------------- prepare

// Four rows from x, `stride` apart, into four columns of out, whose rows are `rows` long.
PACELINE_INLINE void transpose4(const float* x, Index stride, Index count, float* out, Index rows) {
  Index k = 0;
  for (; k + 4 <= count; k += 4) {
    __m128 a = _mm_loadu_ps(x + k), b = _mm_loadu_ps(x + stride + k);
    __m128 c = _mm_loadu_ps(x + 2 * stride + k), d = _mm_loadu_ps(x + 3 * stride + k);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out + k * rows, a);
    _mm_storeu_ps(out + (k + 1) * rows, b);
    _mm_storeu_ps(out + (k + 2) * rows, c);
    _mm_storeu_ps(out + (k + 3) * rows, d);
  }
  for (; k < count; ++k) {
    for (Index r = 0; r < 4; ++r) out[k * rows + r] = x[r * stride + k];
  }
}

void prepare_floats(const LinearJob& job, Block block) {
  if (block.rows == 1) return;  // `multiply` reads x itself
  float* out = reinterpret_cast<float*>(job.prepared + block.low * row_bytes(job));
  const float* x = job.x + block.low * job.x_stride;
  Index r = 0;
  for (; r + 4 <= block.rows; r += 4)
    transpose4(x + r * job.x_stride, job.x_stride, job.in_features, out + r, block.rows);
  for (; r < block.rows; ++r) {
    for (Index k = 0; k < job.in_features; ++k) out[k * block.rows + r] = x[r * job.x_stride + k];
  }
}

// The largest magnitude, as bits: ordered as integers, infinity and then NaN come after every number.
PACELINE_INLINE int32_t largest_bits(const float* x, Index count) {
  const Ints magnitude = all_ints(0x7fffffff);
  Ints most = no_ints();
  for (Index k = 0; k < count; k += kWidth) {
    const Floats v = load(x + k, first(count - k));
#if defined(__AVX512F__)
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(v), magnitude));
#else
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v), magnitude));
#endif
  }
  int32_t lanes[kWidth], found = 0;
  __builtin_memcpy(lanes, &most, sizeof most);
  for (int32_t lane : lanes) found = lane > found ? lane : found;
  return found;
}

struct Quantizer {
  float scale, inverse;
};

// Symmetric: x is about scale * q with q in [-127, 127]. Not finite gives NaN, which then is the scale of the result;
// below 2 ** -120 counts as zero, as its inverse would overflow.
PACELINE_INLINE Quantizer quantizer(int32_t bits) {
  if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
  float largest;
  __builtin_memcpy(&largest, &bits, sizeof bits);
  if (largest < 7.5e-37f) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

// kWidth activations as bytes, rounded half to even; returns them as integers too.
PACELINE_INLINE Ints quantize_vector(const float* x, Mask m, Floats inverse, int8_t* out) {
  const Ints q = to_ints(mul(load(x, m), inverse));
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(q));
#else
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
#endif
  return q;
}

// Activations [low, high) of a row into [k / 4][rows][4]; `out` is the row's place in the block. Returns their sum.
// (Where one is not finite, inverse is 0: 0 times infinity is NaN, which becomes the lowest integer. No matter: the
// scale is NaN.)
PACELINE_INLINE int32_t quantize_span(const float* x, Index low, Index high, Index in_features, float inverse,
                                      uint8_t* out, Index rows) {
  int8_t bytes[kWidth];
  Ints total = no_ints();
  for (Index k = low; k < high; k += kWidth) {
    const Index inside = (high < in_features ? high : in_features) - k;
    total = add_ints(total, quantize_vector(x + k, first(inside > 0 ? inside : 0), all(inverse), bytes));
    const Index units = (high - k < kWidth ? high - k : kWidth) / 4;
    for (Index u = 0; u < units; ++u) __builtin_memcpy(out + (k / 4 + u) * rows * 4, bytes + u * 4, 4);
  }
  int32_t lanes[kWidth];
  __builtin_memcpy(lanes, &total, sizeof total);
  uint32_t sum = 0;  // wraps where lanes are meaningless
  for (int32_t lane : lanes) sum += static_cast<uint32_t>(lane);
  return static_cast<int32_t>(sum);
}

// Where sums of products start: weights are stored with an offset that this takes away, -offset times the sum of
// activations. int4 without minimums is q - 8; int8 for VNNI, whose one side is unsigned, q + 128.
PACELINE_INLINE int32_t start_of(const LinearJob& job, int32_t sum) {
  const uint32_t offset = job.kind == WeightKind::kInt4 ? 8 : kInt8Offset;
  return static_cast<int32_t>(0u - offset * static_cast<uint32_t>(sum));
}

void prepare_integers(const LinearJob& job, Block block) {
  uint8_t* out = job.prepared + block.low * row_bytes(job);
  const Index groups = job.depth / job.group;
  for (Index r = 0; r < block.rows; ++r) {
    const float* x = job.x + (block.low + r) * job.x_stride;
    for (Index g = 0; g < groups; ++g) {
      const Index low = g * job.group, high = low + job.group;
      const Index inside = (high < job.in_features ? high : job.in_features) - low;
      const Quantizer found = quantizer(largest_bits(x + low, inside));
      const int32_t sum = quantize_span(x, low, high, job.in_features, found.inverse, out + r * 4, block.rows);
      const Index at = (block.low + r) * groups + g;
      job.row_scale[at] = found.scale;
      if (job.has_minimum) {
        job.row_sum[at] = found.scale * static_cast<float>(sum);
      } else {
        reinterpret_cast<int32_t*>(job.row_sum)[at] = start_of(job, sum);
      }
    }
  }
}

void prepare(const LinearJob& job, int64_t index) {
  const Block block = block_of(job, index);
  switch (job.kind) {
    case WeightKind::kFloat32:
    case WeightKind::kBFloat16: return prepare_floats(job, block);
    case WeightKind::kInt8:
    case WeightKind::kInt4: return prepare_integers(job, block);
  }
}

// ------------------------------------------------------------------------------------------------ tiles

// Where a tile stands in y: its first row, and its first channel in the order of panels.
struct Place {
  Index row, channel;
};

// Inputs that a tile takes. While it reads their weights it asks for those `ahead` bytes beyond, unless that is 0.
struct Part {
  Index low, high, ahead;
};

// Each computes [R][kPanel] of x W^T for the R rows of a block and one panel.

PACELINE_INLINE Floats load_weights(const float* w) { return load(w); }
PACELINE_INLINE Floats load_weights(const uint16_t* w) { return load_bfloat16(w); }

template <Index R, class Weight>
PACELINE_INLINE void float_step(const float* a, const Weight* w, Index ahead, Floats (&sums)[R][kVectors]) {
  const char* later = reinterpret_cast<const char*>(w) + ahead;
  if (ahead) {
    for (Index byte = 0; byte < kPanel * static_cast<Index>(sizeof(Weight)); byte += 64) {
      _mm_prefetch(later + byte, _MM_HINT_T0);
    }
  }
  const Floats w0 = load_weights(w), w1 = load_weights(w + kWidth);
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    const Floats x = all(a[r]);
    sums[r][0] = fma(x, w0, sums[r][0]);
    sums[r][1] = fma(x, w1, sums[r][1]);
  }
}

// Inputs [part.low, part.high) alone; all parts but the first add to the tile.
template <Index R, class Weight>
void tile_floats(const LinearJob&, const uint8_t* prepared, const uint8_t* panel, Place, Part part, float* tile) {
  // A sum waits four cycles for its predecessor: with few rows, steps of k take turns in several sums.
  constexpr Index U = R == 1 ? 4 : R <= 3 ? 2 : 1;
  const float* a = reinterpret_cast<const float*>(prepared);
  const Weight* w = reinterpret_cast<const Weight*>(panel);
  Floats sums[U][R][kVectors];
  PACELINE_UNROLL
  for (Index u = 0; u < U; ++u) {
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      PACELINE_UNROLL
      for (Index v = 0; v < kVectors; ++v) sums[u][r][v] = zeros();
    }
  }
  Index k = part.low;
  for (; k + U <= part.high; k += U) {
    PACELINE_UNROLL
    for (Index u = 0; u < U; ++u) float_step<R>(a + (k + u) * R, w + (k + u) * kPanel, part.ahead, sums[u]);
  }
  if (U > 1) {
    for (; k < part.high; ++k) float_step<R>(a + k * R, w + k * kPanel, part.ahead, sums[0]);
  }
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) {
      float* cell = tile + r * kPanel + v * kWidth;
      Floats total = sums[0][r][v];
      PACELINE_UNROLL
      for (Index u = 1; u < U; ++u) total = add(total, sums[u][r][v]);
      store(cell, part.low ? add(load(cell), total) : total);
    }
  }
}

#if defined(__AVX512F__)
// Four products of unsigned and signed bytes, added to a 32-bit sum; exact.
PACELINE_INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
}
PACELINE_INLINE Ints broadcast4(const uint8_t* p) { return _mm512_set1_epi32(read_int(p)); }
PACELINE_INLINE Ints low_nibbles(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
PACELINE_INLINE Ints high_nibbles(Ints x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
#else
#if PACELINE_VNNI
PACELINE_INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
}
#endif
PACELINE_INLINE Ints broadcast4(const uint8_t* p) { return _mm256_set1_epi32(read_int(p)); }
PACELINE_INLINE Ints low_nibbles(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
PACELINE_INLINE Ints high_nibbles(Ints x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
#endif

// Four inputs of R rows times a panel, added to `sums`.
template <Index R>
PACELINE_INLINE void int8_step(const uint8_t* a, const uint8_t* w, Ints (&sums)[R][kVectors]) {
  const Ints w0 = load_ints(w), w1 = load_ints(w + kPanel * 2);
#if PACELINE_VNNI
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    const Ints x = broadcast4(a + r * 4);
    sums[r][0] = dot(sums[r][0], w0, x);
    sums[r][1] = dot(sums[r][1], w1, x);
    keep(sums[r][0]);
    keep(sums[r][1]);
  }
#else
  // VPMADDUBSW wants one unsigned side: |w| * (x with w's sign). Both are at most 127, and two products of that size
  // fit 16 bits without saturating.
  const Ints size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1), ones = _mm256_set1_epi16(1);
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    const Ints x = broadcast4(a + r * 4);
    const Ints pairs0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(x, w0));
    const Ints pairs1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(x, w1));
    sums[r][0] = add_ints(sums[r][0], _mm256_madd_epi16(pairs0, ones));
    sums[r][1] = add_ints(sums[r][1], _mm256_madd_epi16(pairs1, ones));
    keep(sums[r][0]);
    keep(sums[r][1]);
  }
#endif
}

// Integer sums of the groups, each times its rows' scales, add up in the tile; the channels' scales come last.
template <Index R>
void tile_int8(const LinearJob& job, const uint8_t* prepared, const uint8_t* panel, Place place, Part, float* tile) {
  constexpr Index U = R == 1 ? 4 : R <= 3 ? 2 : 1;
  const Index groups = job.depth / job.group, steps = job.group / 4;
  const uint8_t* a = prepared;
  const uint8_t* w = panel;
  for (Index g = 0; g < groups; ++g) {
    Ints sums[U][R][kVectors];
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      const float* start = job.row_sum + (place.row + r) * groups + g;
      PACELINE_UNROLL
      for (Index u = 0; u < U; ++u) {
        sums[u][r][0] = sums[u][r][1] = kInt8Offset && u == 0 ? all_ints(read_int(start)) : no_ints();
      }
    }
    Index k = 0;
    for (; k + U <= steps; k += U) {
      PACELINE_UNROLL
      for (Index u = 0; u < U; ++u) int8_step<R>(a + u * R * 4, w + u * kPanel * 4, sums[u]);
      a += U * R * 4;
      w += U * kPanel * 4;
    }
    if (U > 1) {
      for (; k < steps; ++k) {
        int8_step<R>(a, w, sums[0]);
        a += R * 4;
        w += kPanel * 4;
      }
    }
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      const Floats scale = all(job.row_scale[(place.row + r) * groups + g]);
      PACELINE_UNROLL
      for (Index v = 0; v < kVectors; ++v) {
        Ints total = sums[0][r][v];
        PACELINE_UNROLL
        for (Index u = 1; u < U; ++u) total = add_ints(total, sums[u][r][v]);
        float* cell = tile + r * kPanel + v * kWidth;
        store(cell, g ? fma(to_floats(total), scale, load(cell)) : mul(to_floats(total), scale));
      }
    }
  }
  PACELINE_UNROLL
  for (Index v = 0; v < kVectors; ++v) {
    const Floats scale = load(job.channel_scale + place.channel + v * kWidth);
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      float* cell = tile + r * kPanel + v * kWidth;
      store(cell, mul(load(cell), scale));
    }
  }
}

// A panel holds, for each group: kPanel scales, kPanel minimums if the weights have them (both float16), then
// [group / 8][kPanel][4] bytes: the low nibbles are inputs 8 i to 8 i + 3, the high ones 8 i + 4 to 8 i + 7.
template <Index R, bool kMinimum>
void tile_int4(const LinearJob& job, const uint8_t* prepared, const uint8_t* panel, Place place, Part, float* tile) {
  PACELINE_UNROLL
  for (Index r = 0; r < R * kVectors; ++r) store(tile + r * kWidth, zeros());
  const Index groups = job.depth / job.group, head = kPanel * 2 * (kMinimum ? 2 : 1);
  const uint8_t* a = prepared;
  const uint8_t* w = panel;
  for (Index g = 0; g < groups; ++g) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w);
    w += head;
    Ints sums[R][kVectors];
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      const float* start = job.row_sum + (place.row + r) * groups + g;
      sums[r][0] = sums[r][1] = kMinimum ? no_ints() : all_ints(read_int(start));
      keep(sums[r][0]);
      keep(sums[r][1]);
    }
#if PACELINE_VNNI
    for (Index k = 0; k < job.group; k += 8) {
      const Ints w0 = load_ints(w), w1 = load_ints(w + kPanel * 2);
      const Ints low0 = low_nibbles(w0), low1 = low_nibbles(w1), high0 = high_nibbles(w0), high1 = high_nibbles(w1);
      PACELINE_UNROLL
      for (Index r = 0; r < R; ++r) {
        const Ints x = broadcast4(a + r * 4), y = broadcast4(a + (R + r) * 4);
        sums[r][0] = dot(dot(sums[r][0], low0, x), high0, y);
        sums[r][1] = dot(dot(sums[r][1], low1, x), high1, y);
        keep(sums[r][0]);
        keep(sums[r][1]);
      }
      a += R * 8;
      w += kPanel * 4;
    }
#else
    // A pair of products is at most 2 * 15 * 127: eight of them, 32 inputs, fit 16 bits.
    for (Index part = 0; part < job.group; part += 32) {
      Ints pairs[R][kVectors];
      PACELINE_UNROLL
      for (Index r = 0; r < R; ++r) {
        PACELINE_UNROLL
        for (Index v = 0; v < kVectors; ++v) pairs[r][v] = no_ints();
      }
      for (Index k = 0; k < 32; k += 8) {
        PACELINE_UNROLL
        for (Index v = 0; v < kVectors; ++v) {
          const Ints both = load_ints(w + v * kPanel * 2);
          const Ints low = low_nibbles(both), high = high_nibbles(both);
          PACELINE_UNROLL
          for (Index r = 0; r < R; ++r) {
            const Ints x = broadcast4(a + r * 4), y = broadcast4(a + (R + r) * 4);
            const Ints more = _mm256_add_epi16(_mm256_maddubs_epi16(low, x), _mm256_maddubs_epi16(high, y));
            pairs[r][v] = _mm256_add_epi16(pairs[r][v], more);
            keep(pairs[r][v]);
          }
        }
        a += R * 8;
        w += kPanel * 4;
      }
      const Ints ones = _mm256_set1_epi16(1);
      PACELINE_UNROLL
      for (Index r = 0; r < R; ++r) {
        PACELINE_UNROLL
        for (Index v = 0; v < kVectors; ++v) sums[r][v] = add_ints(sums[r][v], _mm256_madd_epi16(pairs[r][v], ones));
      }
    }
#endif
    Floats scale[kVectors], low[kVectors] = {};
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) {
      scale[v] = load_float16(scales + v * kWidth);
      if (kMinimum) low[v] = load_float16(scales + kPanel + v * kWidth);
    }
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) {
      const Index at = (place.row + r) * groups + g;
      const Floats x_scale = all(job.row_scale[at]), x_sum = all(job.row_sum[at]);
      PACELINE_UNROLL
      for (Index v = 0; v < kVectors; ++v) {
        float* cell = tile + r * kPanel + v * kWidth;
        Floats so_far = load(cell);
        if (kMinimum) so_far = fma(low[v], x_sum, so_far);
        store(cell, fma(to_floats(sums[r][v]), mul(scale[v], x_scale), so_far));
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------- finish

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
      const Mask inside = first(job.outputs - column - v);
      const Index at = r * kPanel + v;
      Floats value = activate(with_bias(job, tile, at, panel * kPanel + v), job.activation);
      if (up) value = mul(value, with_bias(job, up, at, (panel + 1) * kPanel + v));
      if (residual) value = add(value, load(residual + column + v, inside));
      store(y + column + v, value, inside);
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
// the first-level cache. Integer ones are a quarter of the size.
constexpr Index kPartInputs = 256;
constexpr Index kBlocksAtOnce = 16;

// Tiles of blocks [low, low + count) for one panel, into tiles [count][kMostRows * kPanel].
void compute_tiles(const LinearJob& job, Index low, Index count, Index panel, float* tiles) {
  const Tile* kinds = tiles_of(job);
  const bool floats = job.kind == WeightKind::kFloat32 || job.kind == WeightKind::kBFloat16;
  const uint8_t* weight = job.weight + panel * job.panel_bytes;
  const Index part = floats && count > 1 ? kPartInputs : job.depth;
  // The last block of a part asks for the next part. One block alone reads straight on, which the processor foresees.
  const Index ahead = count > 1 ? part * kPanel * (job.kind == WeightKind::kFloat32 ? 4 : 2) : 0;
  for (Index k = 0; k < job.depth; k += part) {
    for (Index i = 0; i < count; ++i) {
      const Block block = block_of(job, low + i);
      const uint8_t* prepared = job.prepared + block.low * row_bytes(job);
      if (floats && block.rows == 1) prepared = reinterpret_cast<const uint8_t*>(job.x + block.low * job.x_stride);
      const Part inputs{k, k + part < job.depth ? k + part : job.depth, i + 1 < count ? 0 : ahead};
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
