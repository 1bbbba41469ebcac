// What sampling asks of a whole row: its largest logits, its weights, the logits that pass a cutoff. Included after
// vec.h.
#pragma once

#if defined(__AVX512F__)
PACELINE_INLINE unsigned bits(Mask m) { return m; }
PACELINE_INLINE unsigned unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
PACELINE_INLINE unsigned at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
PACELINE_INLINE float greatest(Floats x) { return _mm512_reduce_max_ps(x); }
#else
PACELINE_INLINE unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
PACELINE_INLINE unsigned unordered(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
PACELINE_INLINE unsigned at_least(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
PACELINE_INLINE float greatest(Floats x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
#endif

// The largest of each block of kSampleBlock logits, and of the row; NaN where the row holds one.
float row_maxima(const float* x, int64_t columns, float* maxima) {
  unsigned unsound = 0;
  Floats best = all(-kInfinity);
  for (Index low = 0; low < columns; low += kSampleBlock) {
    Floats even = all(-kInfinity), odd = even;
    if (low + kSampleBlock <= columns) {
      PACELINE_UNROLL
      for (Index i = 0; i < kSampleBlock; i += 2 * kWidth) {
        const Floats a = load(x + low + i), b = load(x + low + i + kWidth);
        unsound |= unordered(a, b);
        even = max(a, even);
        odd = max(b, odd);
      }
    } else {
      for (Index i = low; i < columns; i += kWidth) {
        const Mask inside = first(columns - i);
        const Floats a = select(inside, load(x + i, inside), all(-kInfinity));
        unsound |= unordered(a, a);
        even = max(a, even);
      }
    }
    even = max(even, odd);
    best = max(even, best);
    maxima[low / kSampleBlock] = greatest(even);
  }
  return unsound ? __builtin_nanf("") : greatest(best);
}

// e ** ((x - best) / temperature). Both parts of 1 / temperature are used: the exponent is as exact as x - best is.
PACELINE_INLINE Floats weight(Floats x, const WeightScale& scale) {
  const Floats below = sub(x, all(scale.best)), rough = mul(below, all(scale.inverse));
  const Floats n = round_even(mul(max(all(-87.3f), rough), all(1.44269504088896341f)));
  Floats r = fma(below, all(scale.inverse), mul(n, all(-0.693359375f)));
  r = fma(below, all(scale.rest), r);
  r = fnma(n, all(-2.12194440e-4f), r);
  return select(less(rough, all(-87.3f)), zeros(), exponential_of_rest(r, n));
}

// The weights of a few tokens; those below e ** -87.3 are 0.
void weigh(const float* x, int64_t count, const WeightScale& scale, float* weights) {
  for (Index i = 0; i < count; i += kWidth) {
    const Mask inside = first(count - i);
    store(weights + i, weight(load(x + i, inside), scale), inside);
  }
}

// The weight of each span of kSampleSpan tokens. Spans are short enough for sums in float32: a lane adds 16 or 32.
void weigh_spans(const float* x, int64_t columns, const WeightScale& scale, double* sums) {
  for (Index low = 0; low < columns; low += kSampleSpan) {
    const Index end = low + kSampleSpan < columns ? low + kSampleSpan : columns;
    Floats even = zeros(), odd = zeros();
    Index i = low;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      even = add(even, weight(load(x + i), scale));
      odd = add(odd, weight(load(x + i + kWidth), scale));
    }
    for (; i < end; i += kWidth) {
      const Mask inside = first(end - i);
      even = add(even, select(inside, weight(load(x + i, inside), scale), zeros()));
    }
    sums[low / kSampleSpan] = static_cast<double>(sum(add(even, odd)));
  }
}

// Ids and logits of the tokens whose logit is at least `cutoff`, in the order of their ids; returns how many.
int64_t pick(const float* x, int64_t columns, const float* maxima, float cutoff, int32_t* ids, float* logits) {
  const Floats least = all(cutoff);
  Index count = 0;
  for (Index low = 0; low < columns; low += kSampleBlock) {
    if (maxima[low / kSampleBlock] < cutoff) continue;
    const Index end = low + kSampleBlock < columns ? low + kSampleBlock : columns;
    for (Index i = low; i < end; i += kWidth) {
      const Mask inside = first(end - i);
      unsigned found = at_least(load(x + i, inside), least) & bits(inside);
      for (; found; found &= found - 1) {
        const Index token = i + __builtin_ctz(found);
        ids[count] = static_cast<int32_t>(token);
        logits[count++] = x[token];
      }
    }
  }
  return count;
}
