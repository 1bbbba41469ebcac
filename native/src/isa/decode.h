// Attention of decodes: one query a row. After attention.h.
#pragma once

#if defined(__AVX512F__)
PACELINE_INLINE __m256 half_sum(Floats x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
#else
PACELINE_INLINE __m256 half_sum(Floats x) { return x; }
#endif

// The sums of eight registers, in order.
PACELINE_INLINE __m256 sums_of_eight(const Floats (&x)[8]) {
  const __m256 a =
      _mm256_hadd_ps(_mm256_hadd_ps(half_sum(x[0]), half_sum(x[1])), _mm256_hadd_ps(half_sum(x[2]), half_sum(x[3])));
  const __m256 b =
      _mm256_hadd_ps(_mm256_hadd_ps(half_sum(x[4]), half_sum(x[5])), _mm256_hadd_ps(half_sum(x[6]), half_sum(x[7])));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

PACELINE_INLINE void prefetch(const float* row, Index count) {
  for (Index d = 0; d < count; d += 16) _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T0);
}

// q . k of eight keys.
PACELINE_INLINE void eight_dots(const float* q, const float* const* k, Index dim, float* out) {
  Floats sums[8];
  PACELINE_UNROLL
  for (Index i = 0; i < 8; ++i) sums[i] = zeros();
  Index d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    const Floats x = load(q + d);
    PACELINE_UNROLL
    for (Index i = 0; i < 8; ++i) sums[i] = fma(x, load(k[i] + d), sums[i]);
  }
  if (d < dim) {
    const Mask inside = first(dim - d);
    const Floats x = load(q + d, inside);
    PACELINE_UNROLL
    for (Index i = 0; i < 8; ++i) sums[i] = fma(x, load(k[i] + d, inside), sums[i]);
  }
  _mm256_storeu_ps(out, sums_of_eight(sums));
}

// out [dim] = out * decay + weights [count] of values.
PACELINE_INLINE void add_values(float* out, Index dim, float decay, const float* weights, const float* const* v,
                                Index count) {
  constexpr Index kAtOnce = 64 / kWidth;  // registers of features: those of a usual head
  Index d = 0;
  for (; d + kAtOnce * kWidth <= dim; d += kAtOnce * kWidth) {
    Floats sums[kAtOnce];
    for (Index j = 0; j < kAtOnce; ++j) sums[j] = mul(load(out + d + j * kWidth), all(decay));
    for (Index i = 0; i < count; ++i) {
      const Floats weight = all(weights[i]);
      PACELINE_UNROLL
      for (Index j = 0; j < kAtOnce; ++j) sums[j] = fma(weight, load(v[i] + d + j * kWidth), sums[j]);
    }
    for (Index j = 0; j < kAtOnce; ++j) store(out + d + j * kWidth, sums[j]);
  }
  for (; d < dim; d += kWidth) {
    const Mask inside = first(dim - d);
    Floats even = mul(load(out + d, inside), all(decay)), odd = zeros();
    Index i = 0;
    for (; i + 2 <= count; i += 2) {
      even = fma(all(weights[i]), load(v[i] + d, inside), even);
      odd = fma(all(weights[i + 1]), load(v[i + 1] + d, inside), odd);
    }
    if (i < count) even = fma(all(weights[i]), load(v[i] + d, inside), even);
    store(out + d, add(even, odd), inside);
  }
}

// One head's scores [kKeyBlock] to weights; the tail beyond count becomes zero. Returns what earlier sums decay by.
PACELINE_INLINE float soften_row(const AttentionJob& job, float* scores, Index count, float* most, float* total) {
  for (Index i = 0; i < count; i += kWidth) {
    const Mask inside = first(count - i);
    store(scores + i, shaped(job, load(scores + i, inside)), inside);
  }
  for (Index i = count; i < kKeyBlock; ++i) scores[i] = -kInfinity;
  Floats top = all(*most);
  for (Index i = 0; i < kKeyBlock; i += kWidth) top = max(load(scores + i), top);
  alignas(64) float lanes[kWidth];
  store(lanes, top);
  float largest = lanes[0];
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  const Floats base = base_of(all(largest));
  Floats weights = zeros();
  for (Index i = 0; i < kKeyBlock; i += kWidth) {
    const Floats weight = exponential(sub(load(scores + i), base));
    store(scores + i, weight);
    weights = add(weights, weight);
  }
  store(lanes, exponential(sub(all(*most), base)));
  *total = *total * lanes[0] + sum(weights);
  *most = largest;
  return lanes[0];
}

// Results of one head so far.
struct Running {
  float* out;  // [v_dim]
  float most, total;
};

PACELINE_INLINE void finish_decode(const AttentionJob& job, const AttentionPiece& piece, Index head,
                                   const Running& found) {
  if (piece.partial) {
    float* to = piece.partial + (head - piece.kv_head * job.group) * (2 + job.v_dim);
    to[0] = found.most;
    to[1] = found.total;
    __builtin_memcpy(to + 2, found.out, job.v_dim * sizeof(float));
    return;
  }
  const float factor = last_factor(job, head, found.most, found.total);
  float* to = job.out + piece.token * job.out_stride + head * job.v_dim;
  for (Index d = 0; d < job.v_dim; ++d) to[d] = found.out[d] * factor;
}

// All key heads of the piece are taken block by block: their keys are neighbours in memory.
void attend_decode(const AttentionJob& job, const AttentionPiece& piece, float* scratch) {
  const Index group = job.group, v_space = rounded(job.v_dim, 16), heads = piece.kv_heads * group;
  float* scores = scratch;                  // [group][kKeyBlock]
  float* out = scores + group * kKeyBlock;  // [heads][v_space]
  float* most = out + heads * v_space;      // [heads]
  float* total = most + heads;              // [heads]
  for (Index i = 0; i < heads * v_space; ++i) out[i] = 0;
  for (Index h = 0; h < heads; ++h) {
    most[h] = -kInfinity;
    total[h] = 0;
  }
  const float* keys[kKeyBlock + kAhead];
  const float* values[kKeyBlock + kAhead];
  for (Index low = piece.key_low; low < piece.key_high; low += kKeyBlock) {
    const Index left = piece.key_high - low, count = left < kKeyBlock ? left : kKeyBlock;
    locate(job, piece, low, left < kKeyBlock + kAhead ? left : kKeyBlock + kAhead, keys, values);
    for (Index kv = 0; kv < piece.kv_heads; ++kv) {
      const float* q = job.q + piece.token * job.q_stride + (piece.kv_head + kv) * group * job.k_dim;
      for (Index i = 0; i < count; i += 8) {
        // One head's rows lie apart in memory, where the processor's own prefetching does not follow.
        for (Index j = i; j < i + 8; ++j) {
          if (j + kAhead < left) prefetch(keys[j + kAhead], job.k_dim);
          prefetch(values[j], job.v_dim);
        }
        for (Index g = 0; g < group; ++g) {
          eight_dots(q + g * job.k_dim, keys + i, job.k_dim, scores + g * kKeyBlock + i);
        }
      }
      for (Index g = 0; g < group; ++g) {
        const Index h = kv * group + g;
        const float decay = soften_row(job, scores + g * kKeyBlock, count, most + h, total + h);
        add_values(out + h * v_space, job.v_dim, decay, scores + g * kKeyBlock, values, count);
      }
      for (Index i = 0; i < count + kAhead && i < left; ++i) {
        keys[i] += job.k_dim;
        values[i] += job.v_dim;
      }
      for (Index i = left; i % 8 && i < count + 8; ++i) {  // the repeats behind the last
        keys[i] = keys[left - 1];
        values[i] = values[left - 1];
      }
    }
  }
  for (Index h = 0; h < heads; ++h) {
    finish_decode(job, piece, piece.kv_head * group + h, {out + h * v_space, most[h], total[h]});
  }
}

// Joins `count` partial results of a decode, each as `AttentionPiece::partial` describes; `piece` is any of them.
void merge_decode(const AttentionJob& job, const AttentionPiece& piece, const float* partials, int64_t count) {
  const Index heads = piece.kv_heads * job.group, width = 2 + job.v_dim, step = heads * width;
  for (Index h = 0; h < heads; ++h) {
    const float* mine = partials + h * width;
    float most = -kInfinity;
    for (Index i = 0; i < count; ++i) most = mine[i * step] > most ? mine[i * step] : most;
    const float base = most == -kInfinity ? 0.0f : most;
    const Index head = piece.kv_head * job.group + h;
    float* to = job.out + piece.token * job.out_stride + head * job.v_dim;
    float total = 0;
    for (Index d = 0; d < job.v_dim; ++d) to[d] = 0;
    for (Index i = 0; i < count; ++i) {
      const float* part = mine + i * step;
      alignas(64) float decay[kWidth] = {part[0] - base};
      store(decay, exponential(load(decay)));
      total += part[1] * decay[0];
      for (Index d = 0; d < job.v_dim; ++d) to[d] += part[2 + d] * decay[0];
    }
    const float factor = last_factor(job, head, most, total);
    for (Index d = 0; d < job.v_dim; ++d) to[d] *= factor;
  }
}
