// Linear maps, second part: the inner loops, one for each kind of weight and number of rows. After prepare.h.
#pragma once

// Where a tile stands in y: its first row, and its first channel in the order of panels.
struct Place {
  Index row, channel;
};

// Inputs that a tile takes, and what it asks memory for while it reads their weights. Floats: the weights that lie
// `ahead` bytes beyond, unless that is 0. Integers: what lies from `next` on, unless that is null.
struct Part {
  Index low, high, ahead;
  const uint8_t* next;
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
  // One sum a cell, input by input, whatever the number of rows: a row's results are the same bits in any batch. With
  // few rows each sum waits four cycles for its predecessor, in which more is multiplied than memory gives.
  const float* a = reinterpret_cast<const float*>(prepared);
  const Weight* w = reinterpret_cast<const Weight*>(panel);
  Floats sums[R][kVectors];
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) sums[r][v] = zeros();
  }
  for (Index k = part.low; k < part.high; ++k) float_step<R>(a + k * R, w + k * kPanel, part.ahead, sums);
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) {
      float* cell = tile + r * kPanel + v * kWidth;
      store(cell, part.low ? add(load(cell), sums[r][v]) : sums[r][v]);
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

// Weights of few rows are waited for. Processors without AVX-512 foresee what is read one after the other, but not beyond
// a page of 4 KiB, and stall at each: they are asked for this many bytes ahead. With AVX-512 (Zen 4) asking makes it
// slower by half: what the processor foresees has more reads under way.
constexpr Index kWeightsAhead = 2048;

PACELINE_INLINE void ask_ahead([[maybe_unused]] const uint8_t* w) {
#if !defined(__AVX512F__)
  _mm_prefetch(reinterpret_cast<const char*>(w) + kWeightsAhead, _MM_HINT_T0);
#endif
}

// What a step asks for: half of what a step of int8 or int4 reads. int4 also steps at each group, for its scales.
constexpr Index kAskedAStep = kPanel * 2;

// Goes one step through the part of the next panel that a tile asks for. It is brought to the second-level cache: the
// first has no room for it.
PACELINE_INLINE void ask_next(const uint8_t*& next) {
  if (!next) return;
  _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
  next += kAskedAStep;
}

// Four inputs of R rows times a panel, added to `sums`.
template <Index R>
PACELINE_INLINE void int8_step(const uint8_t* a, const uint8_t* w, Ints (&sums)[R][kVectors]) {
  ask_ahead(w);
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

// Integer sums of the groups, each times its rows' scales, add up; the channels' scales come last.
template <Index R>
void tile_int8(const LinearJob& job, const uint8_t* prepared, const uint8_t* panel, Place place, Part part,
               float* tile) {
  constexpr Index U = R == 1 ? 4 : R <= 3 ? 2 : 1;
  const Index groups = job.depth / job.group, steps = job.group / 4;
  const uint8_t* a = prepared;
  const uint8_t* w = panel;
  const uint8_t* next = part.next;
  // Not added up in `tile`: what is written there could be anything's, so that pointers would be read again each time.
  Floats totals[R][kVectors];
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) totals[r][v] = zeros();
  }
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
      ask_next(next);
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
        totals[r][v] = fma(to_floats(total), scale, totals[r][v]);
        keep(totals[r][v]);
      }
    }
  }
  PACELINE_UNROLL
  for (Index v = 0; v < kVectors; ++v) {
    const Floats scale = load(job.channel_scale + place.channel + v * kWidth);
    PACELINE_UNROLL
    for (Index r = 0; r < R; ++r) store(tile + r * kPanel + v * kWidth, mul(totals[r][v], scale));
  }
}

// A panel holds, for each group: kPanel scales, kPanel minimums if the weights have them (both float16), then
// [group / 8][kPanel][4] bytes: the low nibbles are inputs 8 i to 8 i + 3, the high ones 8 i + 4 to 8 i + 7.
template <Index R, bool kMinimum>
void tile_int4(const LinearJob& job, const uint8_t* prepared, const uint8_t* panel, Place place, Part part,
               float* tile) {
  const uint8_t* next = part.next;
  Floats totals[R][kVectors];  // as in `tile_int8`
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) totals[r][v] = zeros();
  }
  const Index groups = job.depth / job.group, head = kPanel * 2 * (kMinimum ? 2 : 1);
  const uint8_t* a = prepared;
  const uint8_t* w = panel;
  for (Index g = 0; g < groups; ++g) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w);
    w += head;
    ask_next(next);
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
      ask_next(next);
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
        ask_ahead(w);
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
        if (kMinimum) totals[r][v] = fma(low[v], x_sum, totals[r][v]);
        totals[r][v] = fma(to_floats(sums[r][v]), mul(scale[v], x_scale), totals[r][v]);
        keep(totals[r][v]);
      }
    }
  }
  PACELINE_UNROLL
  for (Index r = 0; r < R; ++r) {
    PACELINE_UNROLL
    for (Index v = 0; v < kVectors; ++v) store(tile + r * kPanel + v * kWidth, totals[r][v]);
  }
}
