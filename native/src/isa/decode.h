// Attention of decodes: one query a row. After attention.h.
#pragma once

// Heads of a group are taken together, so that a key or value is widened once for all of them.
constexpr Index kMostHeads = 3;

#if defined(__AVX512F__)
PACELINE_INLINE __m256 half_sum(Floats x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
#else
PACELINE_INLINE __m256 half_sum(Floats x) { return x; }
#endif

// The sums of four registers, in order.
PACELINE_INLINE __m128 sums_of_four(const Floats* x) {
  const __m256 sums =
      _mm256_hadd_ps(_mm256_hadd_ps(half_sum(x[0]), half_sum(x[1])), _mm256_hadd_ps(half_sum(x[2]), half_sum(x[3])));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// q . k of `heads` queries, each `dim` long, and as many keys as make eight sums or more: scores[head * kKeyBlock + key].
// Keys begin `offset` elements behind `k[key]`.
template <Index heads, Index keys, class Element>
PACELINE_INLINE void dots(const float* q, const Element* const* k, Index offset, Index dim, float* scores) {
  Floats sums[heads][keys];
  PACELINE_UNROLL
  for (Index h = 0; h < heads; ++h) {
    PACELINE_UNROLL
    for (Index i = 0; i < keys; ++i) sums[h][i] = zeros();
  }
  Index d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    Floats x[heads];
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) x[h] = load(q + h * dim + d);
    PACELINE_UNROLL
    for (Index i = 0; i < keys; ++i) {
      const Floats key = widen(k[i] + offset + d);
      PACELINE_UNROLL
      for (Index h = 0; h < heads; ++h) sums[h][i] = fma(x[h], key, sums[h][i]);
    }
  }
  if (d < dim) {
    PACELINE_UNROLL
    for (Index i = 0; i < keys; ++i) {
      const Floats key = widen(k[i] + offset + d, dim - d);
      PACELINE_UNROLL
      for (Index h = 0; h < heads; ++h) sums[h][i] = fma(load(q + h * dim + d, first(dim - d)), key, sums[h][i]);
    }
  }
  PACELINE_UNROLL
  for (Index h = 0; h < heads; ++h) {
    PACELINE_UNROLL
    for (Index i = 0; i < keys; i += 4) _mm_storeu_ps(scores + h * kKeyBlock + i, sums_of_four(sums[h] + i));
  }
}

#if PACELINE_PAIRS
// The same, of queries that are rounded to bfloat16.
template <Index heads, Index keys>
PACELINE_INLINE void dots(const BFloat16* q, const BFloat16* const* k, Index offset, Index dim, float* scores) {
  Floats sums[heads][keys];
  PACELINE_UNROLL
  for (Index h = 0; h < heads; ++h) {
    PACELINE_UNROLL
    for (Index i = 0; i < keys; ++i) sums[h][i] = zeros();
  }
  for (Index d = 0; d < dim; d += 2 * kWidth) {
    Ints x[heads];
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) x[h] = load_ints(q + h * dim + d, dim - d);
    PACELINE_UNROLL
    for (Index i = 0; i < keys; ++i) {
      const Ints key = load_ints(k[i] + offset + d, dim - d);
      PACELINE_UNROLL
      for (Index h = 0; h < heads; ++h) sums[h][i] = fma(x[h], key, sums[h][i]);
    }
  }
  PACELINE_UNROLL
  for (Index h = 0; h < heads; ++h) {
    PACELINE_UNROLL
    for (Index i = 0; i < keys; i += 4) _mm_storeu_ps(scores + h * kKeyBlock + i, sums_of_four(sums[h] + i));
  }
}
#endif

// Keys that come together, at least.
template <class Product>
constexpr Index kEven = std::is_same<Product, float>::value ? 1 : 2;

// Eight keys.
template <Index heads, class Query, class Element>
PACELINE_INLINE void eight_dots(const Query* q, const Element* const* k, Index offset, Index dim, float* scores) {
  constexpr Index kKeys = heads == 1 ? 8 : 4;
  for (Index i = 0; i < 8; i += kKeys) dots<heads, kKeys>(q, k + i, offset, dim, scores + i);
}

// For each head h: out[h * out_step] [dim] = that * decay[h] + weights[h * kKeyBlock] [count] of values, which begin
// `offset` elements behind `v[i]`.
template <Index heads, class Element>
PACELINE_INLINE void add_values(float* out, Index out_step, Index dim, const float* decay, const float* weights,
                                const Element* const* v, Index offset, Index count) {
  // Registers of features: as many as there are, next to weights, or as a usual head has.
  constexpr Index kAtOnce = heads == 1 ? 64 / kWidth : 4;
  Index d = 0;
  for (; d + kAtOnce * kWidth <= dim; d += kAtOnce * kWidth) {
    Floats sums[heads][kAtOnce];
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) {
      PACELINE_UNROLL
      for (Index j = 0; j < kAtOnce; ++j) sums[h][j] = mul(load(out + h * out_step + d + j * kWidth), all(decay[h]));
    }
    for (Index i = 0; i < count; ++i) {
      Floats weight[heads];
      PACELINE_UNROLL
      for (Index h = 0; h < heads; ++h) weight[h] = all(weights[h * kKeyBlock + i]);
      PACELINE_UNROLL
      for (Index j = 0; j < kAtOnce; ++j) {
        const Floats value = widen(v[i] + offset + d + j * kWidth);
        PACELINE_UNROLL
        for (Index h = 0; h < heads; ++h) sums[h][j] = fma(weight[h], value, sums[h][j]);
      }
    }
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) {
      PACELINE_UNROLL
      for (Index j = 0; j < kAtOnce; ++j) store(out + h * out_step + d + j * kWidth, sums[h][j]);
    }
  }
  for (; d < dim; d += kWidth) {
    Floats sums[heads][2];  // of even and odd keys
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) {
      sums[h][0] = mul(load(out + h * out_step + d, first(dim - d)), all(decay[h]));
      sums[h][1] = zeros();
    }
    const auto take = [&](Index i, Index which) __attribute__((always_inline)) {
      const Floats value = widen(v[i] + offset + d, dim - d);
      PACELINE_UNROLL
      for (Index h = 0; h < heads; ++h) sums[h][which] = fma(all(weights[h * kKeyBlock + i]), value, sums[h][which]);
    };
    Index i = 0;
    for (; i + 2 <= count; i += 2) {
      take(i, 0);
      take(i + 1, 1);
    }
    if (i < count) take(i, 0);
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) store(out + h * out_step + d, add(sums[h][0], sums[h][1]), first(dim - d));
  }
}

#if PACELINE_PAIRS
// The same, with weights that are rounded to bfloat16, an even number of them: those beyond the keys are zero. Features
// come in the order of pairs, see `in_order`; `out` has room for a multiple of kFeatures.
template <Index heads>
PACELINE_INLINE void add_values(float* out, Index out_step, Index dim, const float* decay, const BFloat16* weights,
                                const BFloat16* const* v, Index offset, Index count) {
  constexpr Index kPairs = 2 * kWidth, kAtOnce = kFeatures / kPairs;
  for (Index d = 0; d < dim; d += kFeatures) {
    Floats sums[heads][2 * kAtOnce];
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) {
      PACELINE_UNROLL
      for (Index j = 0; j < 2 * kAtOnce; ++j) {
        sums[h][j] = mul(load(out + h * out_step + d + j * kWidth), all(decay[h]));
      }
    }
    for (Index i = 0; i < count; i += 2) {
      PACELINE_UNROLL
      for (Index j = 0; j < kAtOnce; ++j) {
        const Index at = d + j * kPairs, left = dim - at > 0 ? dim - at : 0;
        const Ints even = load_ints(v[i] + offset + at, left), odd = load_ints(v[i + 1] + offset + at, left);
        const Ints some = first_pairs(even, odd), others = other_pairs(even, odd);
        PACELINE_UNROLL
        for (Index h = 0; h < heads; ++h) {
          const Ints weight = all_ints(read_int(&weights[h * kKeyBlock + i]));
          sums[h][2 * j] = fma(weight, some, sums[h][2 * j]);
          sums[h][2 * j + 1] = fma(weight, others, sums[h][2 * j + 1]);
        }
      }
    }
    PACELINE_UNROLL
    for (Index h = 0; h < heads; ++h) {
      PACELINE_UNROLL
      for (Index j = 0; j < 2 * kAtOnce; ++j) store(out + h * out_step + d + j * kWidth, sums[h][j]);
    }
  }
}

// Features that `add_values` left in the order of pairs, as they are counted.
void in_order(BFloat16, float* row, Index dim) {
  for (Index d = 0; d < dim; d += 2 * kWidth) {
    float block[2 * kWidth];
    __builtin_memcpy(block, row + d, sizeof block);
    for (Index i = 0; i < 2 * kWidth; ++i) row[d + i] = block[i % 8 / 4 * kWidth + i / 8 * 4 + i % 4];
  }
}
#endif
void in_order(float, float*, Index) {}

// x [count] as what products take.
PACELINE_INLINE const float* as_product(const float* x, Index, float*) { return x; }
PACELINE_INLINE const BFloat16* as_product(const float* x, Index count, BFloat16* room) {
  narrow_row(x, count, room);
  return room;
}

template <Index n>
struct Number {
  static constexpr Index value = n;
};

// Calls function(Number<heads>(), head) until all of a group are taken: threes, twos, and one where it must be.
template <class Function>
PACELINE_INLINE void some_heads(Index group, const Function& function) {
  for (Index head = 0; head < group;) {
    const Index left = group - head;
    if (left == 1) {
      function(Number<1>(), head);
      ++head;
    } else if (left == 2 || left == 4) {
      function(Number<2>(), head);
      head += 2;
    } else {
      function(Number<kMostHeads>(), head);
      head += kMostHeads;
    }
  }
}

// Scores or weights [count] times what their keys or values are multiplied with.
PACELINE_INLINE void multiply_row(float* row, const float* scales, Index count) {
  for (Index i = 0; i < count; i += kWidth) {
    const Mask inside = first(count - i);
    store(row + i, mul(load(row + i, inside), load(scales + i, inside)), inside);
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
    float* to = piece.partial + (head - piece.kv_head * job.group) * (2 + job.pool.v_dim);
    to[0] = found.most;
    to[1] = found.total;
    __builtin_memcpy(to + 2, found.out, job.pool.v_dim * sizeof(float));
    return;
  }
  const float factor = last_factor(job, head, found.most, found.total);
  float* to = job.out + piece.token * job.out_stride + head * job.pool.v_dim;
  for (Index d = 0; d < job.pool.v_dim; ++d) to[d] = found.out[d] * factor;
}

// A core that has AVX-512 has a large second-level cache, and few lines of the first one can be on their way at once.
#if defined(__AVX512F__)
constexpr auto kExpectIn = _MM_HINT_T1;
#else
constexpr auto kExpectIn = _MM_HINT_T0;
#endif

// Rows [low, high) are needed soon.
template <class Element>
PACELINE_INLINE void expect_rows(const Element* const* rows, Index low, Index high, Index start, Index bytes) {
  for (Index i = low; i < high; ++i) {
    for (Index at = 0; at < bytes; at += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(rows[i] + start) + at, kExpectIn);
    }
  }
}

// So are the first ones of a piece.
template <class Element>
PACELINE_INLINE void expect_piece(const AttentionJob& job, const AttentionPiece& piece) {
  const PagedPool& pool = job.pool;
  const Index keys = piece.key_high - piece.key_low, count = keys < kAhead ? keys : kAhead, heads = piece.kv_heads;
  Places<Element, kAhead> places;
  locate(job, piece, piece.key_low, count, places);
  expect_rows(places.keys, 0, count, piece.kv_head * pool.k_dim, heads * pool.k_dim * Index(sizeof(Element)));
  expect_rows(places.values, 0, count, piece.kv_head * pool.v_dim, heads * pool.v_dim * Index(sizeof(Element)));
}

// All key heads of the piece are taken together. `Product` is what queries and weights are for products: float, or
// BFloat16 over a pool of it.
template <class Product, class Element>
void decode(const AttentionJob& job, const AttentionPiece& piece, const AttentionPiece* next, float* scratch) {
  const PagedPool& pool = job.pool;
  const Index group = job.group, v_space = rounded(pool.v_dim, kFeatures), heads = piece.kv_heads * group;
  const Index k_start = piece.kv_head * pool.k_dim, k_bytes = piece.kv_heads * pool.k_dim * Index(sizeof(Element));
  const Index v_start = piece.kv_head * pool.v_dim, v_bytes = piece.kv_heads * pool.v_dim * Index(sizeof(Element));
  float* scores = scratch;                  // [heads][kKeyBlock]
  float* out = scores + heads * kKeyBlock;  // [heads][v_space]
  float* most = out + heads * v_space;      // [heads]
  float* total = most + heads;              // [heads]
  float* decay = total + heads;             // [heads]
  float* ones = decay + heads;              // [group]
  // [heads][k_dim] and [heads][kKeyBlock], where products take no floats.
  Product* const query_room = reinterpret_cast<Product*>(ones + group);
  Product* const weight_room = query_room + heads * pool.k_dim;
  const float* q = job.q + piece.token * job.q_stride + piece.kv_head * group * pool.k_dim;
  const Product* const queries = as_product(q, heads * pool.k_dim, query_room);
  for (Index i = 0; i < heads * v_space; ++i) out[i] = 0;
  for (Index h = 0; h < heads; ++h) {
    most[h] = -kInfinity;
    total[h] = 0;
  }
  for (Index g = 0; g < group; ++g) ones[g] = 1;
  Places<Element, kKeyBlock + kAhead> places;
  float k_scales[kKeyBlock], v_scales[kKeyBlock];
  for (Index low = piece.key_low; low < piece.key_high; low += kKeyBlock) {
    const Index left = piece.key_high - low, count = left < kKeyBlock ? left : kKeyBlock;
    const Index known = left < kKeyBlock + kAhead ? left : kKeyBlock + kAhead;
    locate(job, piece, low, known, places);
    if (next && left <= kKeyBlock) expect_piece<Element>(job, *next);
    for (Index i = 0; i < count; i += 8) {
      const Index from = i + kAhead < known ? i + kAhead : known, to = from + 8 < known ? from + 8 : known;
      expect_rows(places.keys, from, to, k_start, k_bytes);
      expect_rows(places.values, from, to, v_start, v_bytes);
      for (Index kv = 0; kv < piece.kv_heads; ++kv) {
        const Index offset = k_start + kv * pool.k_dim;
        const Product* mine = queries + kv * group * pool.k_dim;
        float* row = scores + kv * group * kKeyBlock + i;
        some_heads(group, [&](auto some, Index g) __attribute__((always_inline)) {
          eight_dots<some.value>(mine + g * pool.k_dim, places.keys + i, offset, pool.k_dim, row + g * kKeyBlock);
        });
      }
    }
    for (Index kv = 0; kv < piece.kv_heads; ++kv) {
      if constexpr (kScaled<Element>) {
        for (Index i = 0; i < count; ++i) {
          const Index at = places.slots[i] * pool.kv_heads + piece.kv_head + kv;
          k_scales[i] = pool.key_scales[at];
          v_scales[i] = pool.value_scales[at];
        }
      }
      for (Index h = kv * group; h < (kv + 1) * group; ++h) {
        float* const row = scores + h * kKeyBlock;
        if constexpr (kScaled<Element>) multiply_row(row, k_scales, count);
        decay[h] = soften_row(job, row, count, most + h, total + h);
        if constexpr (kScaled<Element>) multiply_row(row, v_scales, count);
      }
    }
    const Product* const weights = as_product(scores, heads * kKeyBlock, weight_room);
    for (Index i = 0; i < count; i += kValuesAtOnce) {
      const Index some_keys = count - i < kValuesAtOnce ? count - i : kValuesAtOnce;
      for (Index kv = 0; kv < piece.kv_heads; ++kv) {
        const Index offset = v_start + kv * pool.v_dim, first = kv * group;
        some_heads(group, [&](auto some, Index g) __attribute__((always_inline)) {
          add_values<some.value>(out + (first + g) * v_space, v_space, pool.v_dim, i ? ones : decay + first + g,
                                 weights + (first + g) * kKeyBlock + i, places.values + i, offset,
                                 rounded(some_keys, kEven<Product>));
        });
      }
    }
  }
  for (Index h = 0; h < heads; ++h) {
    in_order(Product(), out + h * v_space, pool.v_dim);
    finish_decode(job, piece, piece.kv_head * group + h, {out + h * v_space, most[h], total[h]});
  }
}

void attend_decode(const AttentionJob& job, const AttentionPiece& piece, const AttentionPiece* next, float* scratch) {
#if PACELINE_PAIRS
  if (pairs_serve(job)) return decode<BFloat16, BFloat16>(job, piece, next, scratch);
#endif
  of_kind(job.pool.kind, [&](auto element) { decode<float, decltype(element)>(job, piece, next, scratch); });
}

// Joins `count` partial results of a decode, each as `AttentionPiece::partial` describes; `piece` is any of them.
void merge_decode(const AttentionJob& job, const AttentionPiece& piece, const float* partials, int64_t count) {
  const Index heads = piece.kv_heads * job.group, width = 2 + job.pool.v_dim, step = heads * width;
  for (Index h = 0; h < heads; ++h) {
    const float* mine = partials + h * width;
    float most = -kInfinity;
    for (Index i = 0; i < count; ++i) most = mine[i * step] > most ? mine[i * step] : most;
    const float base = most == -kInfinity ? 0.0f : most;
    const Index head = piece.kv_head * job.group + h;
    float* to = job.out + piece.token * job.out_stride + head * job.pool.v_dim;
    float total = 0;
    for (Index d = 0; d < job.pool.v_dim; ++d) to[d] = 0;
    for (Index i = 0; i < count; ++i) {
      const float* part = mine + i * step;
      alignas(64) float decay[kWidth] = {part[0] - base};
      store(decay, exponential(load(decay)));
      total += part[1] * decay[0];
      for (Index d = 0; d < job.pool.v_dim; ++d) to[d] += part[2 + d] * decay[0];
    }
    const float factor = last_factor(job, head, most, total);
    for (Index d = 0; d < job.pool.v_dim; ++d) to[d] *= factor;
  }
}
