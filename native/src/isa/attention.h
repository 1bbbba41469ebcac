// Attention over paged keys and values with an online softmax. Included after vec.h.
//
// A chunk has many queries: they stand side by side in the lanes of a register, so that the softmax over keys is plain
// arithmetic on registers, and scores, weights and outputs lie transposed ([key][query], [feature][query]).
// A decode has one query: the lanes hold features for q . k and for the sum of values, keys for the softmax.
#pragma once

constexpr Index kQueryPanel = 2 * kWidth;
constexpr Index kKeyBlock = 64;  // keys taken at a time
constexpr Index kAhead = 16;     // a decode asks for keys this many before it needs them
#if defined(__AVX512F__)
constexpr Index kRowsAtOnce = 8;  // keys (scores) or features (outputs): 16 sums
#else
constexpr Index kRowsAtOnce = 4;  // 8 sums
#endif

PACELINE_INLINE Index rounded(Index n, Index to) { return (n + to - 1) / to * to; }

// Where keys and values [low, low + count) of a row and head lie. Places up to the next multiple of 8 repeat the last,
// so that keys can be taken by eights.
PACELINE_INLINE void locate(const AttentionJob& job, const AttentionPiece& piece, Index low, Index count,
                            const float** keys, const float** values) {
  const int64_t* table = job.tables + piece.row * job.table_stride;
  const Index k_step = job.kv_heads * job.k_dim, v_step = job.kv_heads * job.v_dim;
  Index i = 0, block = low / job.block_size, offset = low % job.block_size;
  while (i < count) {
    const Index slot = table[block] * job.block_size + offset;
    const float* k = job.keys + slot * k_step + piece.kv_head * job.k_dim;
    const float* v = job.values + slot * v_step + piece.kv_head * job.v_dim;
    for (; offset < job.block_size && i < count; ++offset, ++i) {
      keys[i] = k;
      values[i] = v;
      k += k_step;
      v += v_step;
    }
    ++block;
    offset = 0;
  }
  for (; i % 8; ++i) {
    keys[i] = keys[count - 1];
    values[i] = values[count - 1];
  }
}

// Scratch of a chunk, carved from one piece of memory. `panels` = query panels.
struct Scratch {
  float *q, *keys, *values, *weights, *out, *most, *total;
  int32_t* positions;
};

PACELINE_INLINE Scratch carve(const AttentionJob& job, Index panels, float* at, Index* used) {
  const Index v_rows = rounded(job.v_dim, kRowsAtOnce);
  Scratch s;
  float* const start = at;
  const auto take = [&](Index floats) __attribute__((always_inline)) {
    float* const piece = at;
    at += rounded(floats, 16);
    return piece;
  };
  s.q = take(panels * job.k_dim * kQueryPanel);
  s.keys = take(kKeyBlock * job.k_dim);
  s.values = take(kKeyBlock * v_rows);
  s.weights = take(kKeyBlock * kQueryPanel);
  s.out = take(panels * v_rows * kQueryPanel);
  s.most = take(panels * kQueryPanel);
  s.total = take(panels * kQueryPanel);
  s.positions = reinterpret_cast<int32_t*>(take(panels * kQueryPanel));
  *used = at - start;
  return s;
}

int64_t attention_scratch(const AttentionJob& job, int64_t most_queries) {
  Index chunk = 0;
  carve(job, rounded(most_queries * job.group, kQueryPanel) / kQueryPanel, nullptr, &chunk);
  const Index decode = job.group * (kKeyBlock + job.kv_heads * (rounded(job.v_dim, 16) + 2)) + 64;
  return chunk > decode ? chunk : decode;
}

PACELINE_INLINE Floats shaped(const AttentionJob& job, Floats score) {
  score = mul(score, all(job.scale));
  return job.softcap > 0 ? mul(all(job.softcap), hyperbolic_tangent(div(score, all(job.softcap)))) : score;
}

// -infinity where no key has counted yet; there is nothing to subtract then.
PACELINE_INLINE Floats base_of(Floats most) { return select(equal(most, all(-kInfinity)), zeros(), most); }

// Queries [first, ...) of the panel as [k_dim][kQueryPanel]; column j is query j / group, head j % group.
void load_queries(const AttentionJob& job, const AttentionPiece& piece, Index panel, float* out, int32_t* positions) {
  const Index columns = piece.count * job.group;
  for (Index lane = 0; lane < kQueryPanel; ++lane) {
    const Index j = panel * kQueryPanel + lane;
    const bool real = j < columns;
    const Index query = real ? j / job.group : piece.count - 1;
    positions[lane] = static_cast<int32_t>(piece.position + query);
    if (!real) {
      for (Index d = 0; d < job.k_dim; ++d) out[d * kQueryPanel + lane] = 0;
      continue;
    }
    const Index head = piece.kv_head * job.group + j % job.group;
    const float* q = job.q + (piece.token + query) * job.q_stride + head * job.k_dim;
    for (Index d = 0; d < job.k_dim; ++d) out[d * kQueryPanel + lane] = q[d];
  }
}

// Keys and values [low, low + count) into dense rows. Rows up to the next multiple of kRowsAtOnce, and the ends of rows
// of values, are zero.
void gather(const AttentionJob& job, const AttentionPiece& piece, Index low, Index count, const Scratch& s) {
  const Index v_rows = rounded(job.v_dim, kRowsAtOnce);
  const float* keys[kKeyBlock];
  const float* values[kKeyBlock];
  locate(job, piece, low, count, keys, values);
  for (Index i = 0; i < count; ++i) {
    __builtin_memcpy(s.keys + i * job.k_dim, keys[i], job.k_dim * sizeof(float));
    __builtin_memcpy(s.values + i * v_rows, values[i], job.v_dim * sizeof(float));
    for (Index d = job.v_dim; d < v_rows; ++d) s.values[i * v_rows + d] = 0;
  }
  const Index rows = rounded(count, kRowsAtOnce);
  for (Index at = count * job.k_dim; at < rows * job.k_dim; ++at) s.keys[at] = 0;
  for (Index at = count * v_rows; at < rows * v_rows; ++at) s.values[at] = 0;
}

// kRowsAtOnce rows of a times a panel [steps][kQueryPanel], added to `sums`. a[r * row_step + k * step].
PACELINE_INLINE void accumulate(const float* a, Index row_step, Index step, const float* panel, Index steps,
                                Floats (&sums)[kRowsAtOnce][2]) {
  for (Index k = 0; k < steps; ++k) {
    const Floats p0 = load(panel), p1 = load(panel + kWidth);
    PACELINE_UNROLL
    for (Index r = 0; r < kRowsAtOnce; ++r) {
      const Floats x = all(a[r * row_step]);
      sums[r][0] = fma(x, p0, sums[r][0]);
      sums[r][1] = fma(x, p1, sums[r][1]);
    }
    a += step;
    panel += kQueryPanel;
  }
}

// Scores of the gathered keys for one panel of queries into `s.weights` [key][query], shaped and masked.
void score(const AttentionJob& job, Index low, Index count, Index window, const float* q, const int32_t* positions,
           const Scratch& s) {
  const Ints at0 = load_ints(positions), at1 = load_ints(positions + kWidth);
  const Index oldest = positions[0] - window;  // keys up to here are hidden from some query
  const Index newest = positions[0];
  for (Index i = 0; i < count; i += kRowsAtOnce) {
    Floats sums[kRowsAtOnce][2];
    for (auto& pair : sums) pair[0] = pair[1] = zeros();
    accumulate(s.keys + i * job.k_dim, job.k_dim, 1, q, job.k_dim, sums);
    for (Index r = 0; r < kRowsAtOnce; ++r) {
      const Index key = low + i + r;
      Floats a = shaped(job, sums[r][0]), b = shaped(job, sums[r][1]);
      const bool clear = key <= newest && key > oldest + (positions[kQueryPanel - 1] - positions[0]);
      if (i + r >= count) {
        a = b = all(-kInfinity);
      } else if (!clear) {
        // Visible where 0 <= position - key < window.
        const Floats first_bad = all(static_cast<float>(window));
        const Floats ago0 = to_floats(sub_ints(at0, all_ints(static_cast<int32_t>(key))));
        const Floats ago1 = to_floats(sub_ints(at1, all_ints(static_cast<int32_t>(key))));
        a = select(less(ago0, zeros()), all(-kInfinity), select(less(ago0, first_bad), a, all(-kInfinity)));
        b = select(less(ago1, zeros()), all(-kInfinity), select(less(ago1, first_bad), b, all(-kInfinity)));
      }
      store(s.weights + (i + r) * kQueryPanel, a);
      store(s.weights + (i + r) * kQueryPanel + kWidth, b);
    }
  }
}

// Scores become weights e ** (score - largest so far); returns what earlier sums are multiplied by.
void soften(Index count, float* most, float* total, float* weights, Floats (&decay)[2]) {
  for (Index v = 0; v < 2; ++v) {
    Floats top = load(most + v * kWidth);
    const Floats before = top;
    // A NaN score makes its column NaN through its own weight, whatever the maximum.
    for (Index i = 0; i < count; ++i) top = max(load(weights + i * kQueryPanel + v * kWidth), top);
    const Floats base = base_of(top);
    decay[v] = exponential(sub(before, base));
    Floats sum_ = mul(load(total + v * kWidth), decay[v]);
    for (Index i = 0; i < count; ++i) {
      float* at = weights + i * kQueryPanel + v * kWidth;
      const Floats weight = exponential(sub(load(at), base));
      sum_ = add(sum_, weight);
      store(at, weight);
    }
    store(most + v * kWidth, top);
    store(total + v * kWidth, sum_);
  }
}

// Weighted values of the block, added to the transposed output.
void weigh(const AttentionJob& job, Index count, const Scratch& s, float* out, const Floats (&decay)[2]) {
  const Index v_rows = rounded(job.v_dim, kRowsAtOnce);
  for (Index d = 0; d < v_rows; d += kRowsAtOnce) {
    Floats sums[kRowsAtOnce][2];
    float* at = out + d * kQueryPanel;
    for (Index r = 0; r < kRowsAtOnce; ++r)
      for (Index v = 0; v < 2; ++v) sums[r][v] = mul(load(at + r * kQueryPanel + v * kWidth), decay[v]);
    accumulate(s.values + d, 1, v_rows, s.weights, count, sums);
    for (Index r = 0; r < kRowsAtOnce; ++r)
      for (Index v = 0; v < 2; ++v) store(at + r * kQueryPanel + v * kWidth, sums[r][v]);
  }
}

// A sink is one more logit without a value: it enters the maximum and the sum. Returns factor on the weighted values.
PACELINE_INLINE float last_factor(const AttentionJob& job, Index head, float most, float total) {
  if (!job.sinks) return 1.0f / total;
  const float sink = job.sinks[head];
  const float top = sink > most ? sink : most;
  alignas(64) float both[kWidth] = {most - top, sink - top};
  store(both, exponential(load(both)));
  return both[0] / (total * both[0] + both[1]);
}

void attend_chunk(const AttentionJob& job, const AttentionPiece& piece, float* scratch) {
  const Index columns = piece.count * job.group, panels = rounded(columns, kQueryPanel) / kQueryPanel;
  const Index v_rows = rounded(job.v_dim, kRowsAtOnce);
  Index used;
  const Scratch s = carve(job, panels, scratch, &used);
  for (Index p = 0; p < panels; ++p) {
    load_queries(job, piece, p, s.q + p * job.k_dim * kQueryPanel, s.positions + p * kQueryPanel);
  }
  for (Index i = 0; i < panels * kQueryPanel; ++i) {
    s.most[i] = -kInfinity;
    s.total[i] = 0;
  }
  for (Index i = 0; i < panels * v_rows * kQueryPanel; ++i) s.out[i] = 0;
  for (Index low = piece.key_low; low < piece.key_high; low += kKeyBlock) {
    const Index count = piece.key_high - low < kKeyBlock ? piece.key_high - low : kKeyBlock;
    gather(job, piece, low, count, s);
    for (Index p = 0; p < panels; ++p) {
      const int32_t* positions = s.positions + p * kQueryPanel;
      const Index newest = positions[kQueryPanel - 1];
      if (low > newest || low + count <= positions[0] - job.window + 1) continue;  // no query sees any of it
      const Index seen = newest - low + 1 < count ? newest - low + 1 : count;
      score(job, low, seen, job.window, s.q + p * job.k_dim * kQueryPanel, positions, s);
      Floats decay[2];
      soften(seen, s.most + p * kQueryPanel, s.total + p * kQueryPanel, s.weights, decay);
      weigh(job, seen, s, s.out + p * v_rows * kQueryPanel, decay);
    }
  }
  for (Index j = 0; j < columns; ++j) {
    const Index head = piece.kv_head * job.group + j % job.group;
    const float factor = last_factor(job, head, s.most[j], s.total[j]);
    const float* from = s.out + j / kQueryPanel * v_rows * kQueryPanel + j % kQueryPanel;
    float* to = job.out + (piece.token + j / job.group) * job.out_stride + head * job.v_dim;
    for (Index d = 0; d < job.v_dim; ++d) to[d] = from[d * kQueryPanel] * factor;
  }
}

// --------------------------------------------------------------------------------------------- decodes

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
