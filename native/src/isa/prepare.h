// Linear maps, first part: a block of rows as the tiles read it; integer kinds quantize it on the way. After vec.h.
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
    const Floats v = load_first(x + k, count - k);
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

// The first `count` activations of kWidth as bytes, the rest 0, rounded half to even; returns them as integers too.
PACELINE_INLINE Ints quantize_vector(const float* x, Index count, Floats inverse, int8_t* out) {
  const Ints q = to_ints(mul(load_first(x, count), inverse));
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
    total = add_ints(total, quantize_vector(x + k, inside > 0 ? inside : 0, all(inverse), bytes));
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
