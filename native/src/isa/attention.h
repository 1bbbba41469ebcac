// Attention over paged keys and values with an online softmax. Included after cache.h.
//
// A chunk has many queries: they stand side by side in the lanes of a register, so that the softmax over keys is plain
// arithmetic on registers, and scores, weights and outputs lie transposed ([key][query], [feature][query]).
// A decode has one query: the lanes hold features for q . k and for the sum of values, keys for the softmax.
// Keys and values that are no float32 become so on the way into registers, or, for a chunk, into the tile that all its
// queries read: its cells are floats. Where the processor multiplies bfloat16 and the pool is of it, cells are of
// two, neighbours along the sum, and queries and softmax weights are rounded to bfloat16 as well, those of decodes too:
// twice the products.
#pragma once

constexpr Index kQueryPanel = 2 * kWidth;
constexpr Index kKeyBlock = 64;      // keys taken at a time
constexpr Index kValuesAtOnce = 16;  // of them, by a decode for one head after the other
constexpr Index kFeatures = 64;      // of a decode's result, room for a multiple
constexpr Index kAhead = 16;         // a decode may ask for keys and values this many before it needs them
#if defined(__AVX512F__)
constexpr Index kRowsAtOnce = 8;  // keys (scores) or features (outputs): 16 sums
#else
constexpr Index kRowsAtOnce = 4;  // 8 sums
#endif

PACELINE_INLINE Index rounded(Index n, Index to) { return (n + to - 1) / to * to; }

// Where keys and values of head 0 of some positions lie, and their slots.
template <class Element, Index most>
struct Places {
  const Element* keys[most];
  const Element* values[most];
  Index slots[most];
};

// Positions [low, low + count) of a row. Places up to the next multiple of 8 repeat the last, so that keys can be taken
// by eights.
template <class Element, Index most>
PACELINE_INLINE void locate(const AttentionJob& job, const AttentionPiece& piece, Index low, Index count,
                            Places<Element, most>& out) {
  const int64_t* table = job.tables + piece.row * job.table_stride;
  const Index k_step = job.pool.kv_heads * job.pool.k_dim, v_step = job.pool.kv_heads * job.pool.v_dim;
  const Element* const keys = static_cast<const Element*>(job.pool.keys);
  const Element* const values = static_cast<const Element*>(job.pool.values);
  Index i = 0, block = low / job.pool.block_size, offset = low % job.pool.block_size;
  while (i < count) {
    Index slot = table[block] * job.pool.block_size + offset;
    for (; offset < job.pool.block_size && i < count; ++offset, ++i, ++slot) {
      out.keys[i] = keys + slot * k_step;
      out.values[i] = values + slot * v_step;
      out.slots[i] = slot;
    }
    ++block;
    offset = 0;
  }
  for (; i % 8; ++i) {
    out.keys[i] = out.keys[count - 1];
    out.values[i] = out.values[count - 1];
    out.slots[i] = out.slots[count - 1];
  }
}

using Pair = uint32_t;  // two bfloat16
// Elements in a cell of a chunk's tiles: float or Pair.
template <class Cell>
constexpr Index kDeep = std::is_same<Cell, Pair>::value ? 2 : 1;

PACELINE_INLINE Floats load_cells(const float* p) { return load(p); }
PACELINE_INLINE Floats spread(float x) { return all(x); }
#if PACELINE_PAIRS
PACELINE_INLINE bool pairs_serve(const AttentionJob& job) {
  return job.pool.kind == PoolKind::kBFloat16 && job.pool.k_dim % 2 == 0 && has_pairs();
}
PACELINE_INLINE Ints load_cells(const Pair* p) { return load_ints(p); }
PACELINE_INLINE Ints spread(Pair x) { return all_ints(static_cast<int32_t>(x)); }
#endif

// Scratch of a chunk, carved from one piece of memory. `panels` = query panels. Pairs take half of the floats' room.
struct Scratch {
  float *q, *keys, *values, *weights, *out, *most, *total;
  int32_t* positions;
};

PACELINE_INLINE Scratch carve(const AttentionJob& job, Index panels, float* at, Index* used) {
  const Index v_rows = rounded(job.pool.v_dim, kRowsAtOnce);
  Scratch s;
  float* const start = at;
  const auto take = [&](Index floats) __attribute__((always_inline)) {
    float* const piece = at;
    at += rounded(floats, 16);
    return piece;
  };
  s.q = take(panels * job.pool.k_dim * kQueryPanel);
  s.keys = take(kKeyBlock * job.pool.k_dim);
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
  const Index heads = job.pool.kv_heads * job.group;
  const Index decode = heads * (2 * kKeyBlock + job.pool.k_dim + rounded(job.pool.v_dim, kFeatures) + 3) + job.group + 64;
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
      for (Index d = 0; d < job.pool.k_dim; ++d) out[d * kQueryPanel + lane] = 0;
      continue;
    }
    const Index head = piece.kv_head * job.group + j % job.group;
    const float* q = job.q + (piece.token + query) * job.q_stride + head * job.pool.k_dim;
    for (Index d = 0; d < job.pool.k_dim; ++d) out[d * kQueryPanel + lane] = q[d];
  }
}

// Rows [rows][kQueryPanel] of floats become cells, in place; pairs are of two rows, and a last odd row's other is zero.
void fold_rows(float, float*, Index) {}
#if PACELINE_PAIRS
void fold_rows(Pair, float* cells, Index rows) {
  for (Index r = 0; r < rows; r += 2) {
    for (Index v = 0; v < kQueryPanel; v += kWidth) {
      const Floats odd = r + 1 < rows ? load(cells + (r + 1) * kQueryPanel + v) : zeros();
      store_ints(cells + r / 2 * kQueryPanel + v, pairs(load(cells + r * kQueryPanel + v), odd));
    }
  }
}
#endif

// Keys and values [low, low + count) into dense rows of float32. Rows up to the next multiple of kRowsAtOnce, and the
// ends of rows of values, are zero.
template <class Element>
void widen_tiles(const AttentionJob& job, const AttentionPiece& piece, Index low, Index count, const Scratch& s) {
  const PagedPool& pool = job.pool;
  const Index v_rows = rounded(pool.v_dim, kRowsAtOnce);
  Places<Element, kKeyBlock> places;
  locate(job, piece, low, count, places);
  for (Index i = 0; i < count; ++i) {
    float k_scale = 1, v_scale = 1;
    if constexpr (kScaled<Element>) {
      k_scale = pool.key_scales[places.slots[i] * pool.kv_heads + piece.kv_head];
      v_scale = pool.value_scales[places.slots[i] * pool.kv_heads + piece.kv_head];
    }
    widen_row(places.keys[i] + piece.kv_head * pool.k_dim, pool.k_dim, k_scale, s.keys + i * pool.k_dim);
    widen_row(places.values[i] + piece.kv_head * pool.v_dim, pool.v_dim, v_scale, s.values + i * v_rows);
    for (Index d = pool.v_dim; d < v_rows; ++d) s.values[i * v_rows + d] = 0;
  }
  const Index rows = rounded(count, kRowsAtOnce);
  for (Index at = count * pool.k_dim; at < rows * pool.k_dim; ++at) s.keys[at] = 0;
  for (Index at = count * v_rows; at < rows * v_rows; ++at) s.values[at] = 0;
}

void gather(float, const AttentionJob& job, const AttentionPiece& piece, Index low, Index count, const Scratch& s) {
  of_kind(job.pool.kind, [&](auto element) { widen_tiles<decltype(element)>(job, piece, low, count, s); });
}
#if PACELINE_PAIRS
// The same as pairs: keys as they are, values with the next position's beside them.
void gather(Pair, const AttentionJob& job, const AttentionPiece& piece, Index low, Index count, const Scratch& s) {
  const PagedPool& pool = job.pool;
  const Index v_rows = rounded(pool.v_dim, kRowsAtOnce), k_cells = pool.k_dim / 2, rows = rounded(count, kRowsAtOnce);
  Pair* const keys = reinterpret_cast<Pair*>(s.keys);
  Pair* const values = reinterpret_cast<Pair*>(s.values);
  Places<BFloat16, kKeyBlock> places;
  locate(job, piece, low, count, places);
  for (Index i = 0; i < count; ++i) {
    __builtin_memcpy(keys + i * k_cells, places.keys[i] + piece.kv_head * pool.k_dim, k_cells * sizeof(Pair));
  }
  for (Index at = count * k_cells; at < rows * k_cells; ++at) keys[at] = 0;
  for (Index i = 0; i < count; i += 2) {
    const uint16_t* even = &places.values[i][piece.kv_head * pool.v_dim].bits;
    const uint16_t* odd = i + 1 < count ? &places.values[i + 1][piece.kv_head * pool.v_dim].bits : nullptr;
    Pair* const to = values + i / 2 * v_rows;
    Index d = 0;
    for (; odd && d + kWidth <= pool.v_dim; d += kWidth) store_ints(to + d, pairs(even + d, odd + d));
    for (; d < pool.v_dim; ++d) to[d] = Pair{even[d]} | (odd ? Pair{odd[d]} << 16 : Pair{0});
    for (; d < v_rows; ++d) to[d] = 0;
  }
}
#endif

// kRowsAtOnce rows of a times a panel [steps][kQueryPanel], added to `sums`. a[r * row_step + k * step].
template <class Cell>
PACELINE_INLINE void accumulate(const Cell* a, Index row_step, Index step, const Cell* panel, Index steps,
                                Floats (&sums)[kRowsAtOnce][2]) {
  for (Index k = 0; k < steps; ++k) {
    const auto p0 = load_cells(panel), p1 = load_cells(panel + kWidth);
    PACELINE_UNROLL
    for (Index r = 0; r < kRowsAtOnce; ++r) {
      const auto x = spread(a[r * row_step]);
      sums[r][0] = fma(x, p0, sums[r][0]);
      sums[r][1] = fma(x, p1, sums[r][1]);
    }
    a += step;
    panel += kQueryPanel;
  }
}

// Scores of the gathered keys for one panel of queries into `s.weights` [key][query], shaped and masked.
template <class Cell>
void score(const AttentionJob& job, Index low, Index count, Index window, const float* q, const int32_t* positions,
           const Scratch& s) {
  const Index depth = job.pool.k_dim / kDeep<Cell>;
  const Cell* const keys = reinterpret_cast<const Cell*>(s.keys);
  const Ints at0 = load_ints(positions), at1 = load_ints(positions + kWidth);
  const Index oldest = positions[0] - window;  // keys up to here are hidden from some query
  const Index newest = positions[0];
  for (Index i = 0; i < count; i += kRowsAtOnce) {
    Floats sums[kRowsAtOnce][2];
    for (auto& pair : sums) pair[0] = pair[1] = zeros();
    accumulate(keys + i * depth, depth, 1, reinterpret_cast<const Cell*>(q), depth, sums);
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
template <class Cell>
void weigh(const AttentionJob& job, Index count, const Scratch& s, float* out, const Floats (&decay)[2]) {
  const Index v_rows = rounded(job.pool.v_dim, kRowsAtOnce), cells = (count + kDeep<Cell> - 1) / kDeep<Cell>;
  const Cell* const values = reinterpret_cast<const Cell*>(s.values);
  const Cell* const weights = reinterpret_cast<const Cell*>(s.weights);
  for (Index d = 0; d < v_rows; d += kRowsAtOnce) {
    Floats sums[kRowsAtOnce][2];
    float* at = out + d * kQueryPanel;
    for (Index r = 0; r < kRowsAtOnce; ++r)
      for (Index v = 0; v < 2; ++v) sums[r][v] = mul(load(at + r * kQueryPanel + v * kWidth), decay[v]);
    accumulate(values + d, 1, v_rows, weights, cells, sums);
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

template <class Cell>
void attend_chunk_in(const AttentionJob& job, const AttentionPiece& piece, float* scratch) {
  const Index columns = piece.count * job.group, panels = rounded(columns, kQueryPanel) / kQueryPanel;
  const Index v_rows = rounded(job.pool.v_dim, kRowsAtOnce);
  Index used;
  const Scratch s = carve(job, panels, scratch, &used);
  for (Index p = 0; p < panels; ++p) {
    float* const q = s.q + p * job.pool.k_dim * kQueryPanel;
    load_queries(job, piece, p, q, s.positions + p * kQueryPanel);
    fold_rows(Cell(), q, job.pool.k_dim);
  }
  for (Index i = 0; i < panels * kQueryPanel; ++i) {
    s.most[i] = -kInfinity;
    s.total[i] = 0;
  }
  for (Index i = 0; i < panels * v_rows * kQueryPanel; ++i) s.out[i] = 0;
  for (Index low = piece.key_low; low < piece.key_high; low += kKeyBlock) {
    const Index count = piece.key_high - low < kKeyBlock ? piece.key_high - low : kKeyBlock;
    gather(Cell(), job, piece, low, count, s);
    for (Index p = 0; p < panels; ++p) {
      const int32_t* positions = s.positions + p * kQueryPanel;
      const Index newest = positions[kQueryPanel - 1];
      if (low > newest || low + count <= positions[0] - job.window + 1) continue;  // no query sees any of it
      const Index seen = newest - low + 1 < count ? newest - low + 1 : count;
      score<Cell>(job, low, seen, job.window, s.q + p * job.pool.k_dim * kQueryPanel, positions, s);
      Floats decay[2];
      soften(seen, s.most + p * kQueryPanel, s.total + p * kQueryPanel, s.weights, decay);
      fold_rows(Cell(), s.weights, seen);
      weigh<Cell>(job, seen, s, s.out + p * v_rows * kQueryPanel, decay);
    }
  }
  for (Index j = 0; j < columns; ++j) {
    const Index head = piece.kv_head * job.group + j % job.group;
    const float factor = last_factor(job, head, s.most[j], s.total[j]);
    const float* from = s.out + j / kQueryPanel * v_rows * kQueryPanel + j % kQueryPanel;
    float* to = job.out + (piece.token + j / job.group) * job.out_stride + head * job.pool.v_dim;
    for (Index d = 0; d < job.pool.v_dim; ++d) to[d] = from[d * kQueryPanel] * factor;
  }
}

void attend_chunk(const AttentionJob& job, const AttentionPiece& piece, float* scratch) {
#if PACELINE_PAIRS
  if (pairs_serve(job)) return attend_chunk_in<Pair>(job, piece, scratch);
#endif
  attend_chunk_in<float>(job, piece, scratch);
}
