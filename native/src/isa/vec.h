// One vocabulary over AVX2 and AVX-512 registers. Included inside `namespace paceline { namespace {`, so that each
// instruction set has functions of its own.
#pragma once

using Index = int64_t;

#define PACELINE_INLINE inline __attribute__((always_inline))
// Arrays of registers stay in registers only where every loop over them is unrolled.
#define PACELINE_UNROLL _Pragma("GCC unroll 16")

// VPDPBUSD: four products of unsigned and signed bytes in one instruction, from AVX-512 VNNI or its AVX form.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PACELINE_VNNI 1
#else
#define PACELINE_VNNI 0
#endif

// VDPBF16PS: sums of two products of bfloat16 each. Compiled in where the compiler may use it; see `has_pairs`.
#if defined(__AVX512BF16__)
#define PACELINE_PAIRS 1
#else
#define PACELINE_PAIRS 0
#endif

#if defined(__AVX512F__)

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;
constexpr Index kWidth = 16;

PACELINE_INLINE Floats zeros() { return _mm512_setzero_ps(); }
PACELINE_INLINE Floats all(float x) { return _mm512_set1_ps(x); }
PACELINE_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
PACELINE_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
PACELINE_INLINE Mask first(Index n) { return static_cast<Mask>(n >= kWidth ? 0xffff : (1u << n) - 1); }
PACELINE_INLINE Floats load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
PACELINE_INLINE void store(float* p, Floats x, Mask m) { _mm512_mask_storeu_ps(p, m, x); }
PACELINE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
PACELINE_INLINE Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
PACELINE_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
PACELINE_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
PACELINE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
PACELINE_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// Both give b where either is NaN.
PACELINE_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
PACELINE_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
PACELINE_INLINE Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
PACELINE_INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
PACELINE_INLINE Floats select(Mask m, Floats yes, Floats no) { return _mm512_mask_blend_ps(m, no, yes); }
PACELINE_INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }
PACELINE_INLINE Floats round_even(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PACELINE_INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
PACELINE_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
PACELINE_INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
PACELINE_INLINE Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
PACELINE_INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
PACELINE_INLINE Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
PACELINE_INLINE Ints no_ints() { return _mm512_setzero_si512(); }
// 2 ** n for n in [-126, 127].
PACELINE_INLINE Floats power_of_two(Ints n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
PACELINE_INLINE float sum(Floats x) { return _mm512_reduce_add_ps(x); }
#if PACELINE_PAIRS
// Not every processor with AVX-512 has it.
inline bool has_pairs() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}
PACELINE_INLINE Ints bfloat16_bits(Floats x) {
  return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
// Both rounded to bfloat16: `even` in the lower halves of the lanes, `odd` in the upper.
PACELINE_INLINE Ints pairs(Floats even, Floats odd) {
  return _mm512_or_si512(bfloat16_bits(even), _mm512_slli_epi32(bfloat16_bits(odd), 16));
}
// The same of 16 elements that are bfloat16 already.
PACELINE_INLINE Ints pairs(const uint16_t* even, const uint16_t* odd) {
  const auto widened = [](const uint16_t* p) __attribute__((always_inline)) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  };
  return _mm512_or_si512(widened(even), _mm512_slli_epi32(widened(odd), 16));
}
// The first n of 32 elements of two bytes, and zeros.
PACELINE_INLINE Ints load_ints(const void* p, Index n) {
  return n >= 32 ? load_ints(p) : _mm512_maskz_loadu_epi16((uint32_t{1} << n) - 1, p);
}
// Two rows of 32 elements of two bytes, in pairs: those of elements 0 to 3, 8 to 11, 16 to 19 and 24 to 27, and the rest.
PACELINE_INLINE Ints first_pairs(Ints even, Ints odd) { return _mm512_unpacklo_epi16(even, odd); }
PACELINE_INLINE Ints other_pairs(Ints even, Ints odd) { return _mm512_unpackhi_epi16(even, odd); }
PACELINE_INLINE void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
// Two products, added to each lane of `sum`.
PACELINE_INLINE Floats fma(Ints a, Ints b, Floats sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif
PACELINE_INLINE Floats load_bfloat16(const uint16_t* p) {
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
PACELINE_INLINE Floats load_float16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PACELINE_INLINE Floats load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#else

using Floats = __m256;
using Ints = __m256i;
using Mask = __m256;
constexpr Index kWidth = 8;

PACELINE_INLINE Floats zeros() { return _mm256_setzero_ps(); }
PACELINE_INLINE Floats all(float x) { return _mm256_set1_ps(x); }
PACELINE_INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
PACELINE_INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
PACELINE_INLINE Mask first(Index n) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes));
}
PACELINE_INLINE Floats load(const float* p, Mask m) { return _mm256_maskload_ps(p, _mm256_castps_si256(m)); }
PACELINE_INLINE void store(float* p, Floats x, Mask m) { _mm256_maskstore_ps(p, _mm256_castps_si256(m), x); }
PACELINE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
PACELINE_INLINE Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
PACELINE_INLINE Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
PACELINE_INLINE Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
PACELINE_INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
PACELINE_INLINE Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
// Both give b where either is NaN.
PACELINE_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
PACELINE_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
PACELINE_INLINE Mask less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
PACELINE_INLINE Mask equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
PACELINE_INLINE Floats select(Mask m, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, m); }
PACELINE_INLINE Floats absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
PACELINE_INLINE Floats round_even(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PACELINE_INLINE Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
PACELINE_INLINE Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
PACELINE_INLINE Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
PACELINE_INLINE Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
PACELINE_INLINE Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
PACELINE_INLINE Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
PACELINE_INLINE Ints no_ints() { return _mm256_setzero_si256(); }
// 2 ** n for n in [-126, 127].
PACELINE_INLINE Floats power_of_two(Ints n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
PACELINE_INLINE float sum(Floats x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
PACELINE_INLINE Floats load_bfloat16(const uint16_t* p) {
  __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
PACELINE_INLINE Floats load_float16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PACELINE_INLINE Floats load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

#endif

// The first n of kWidth elements, or all. Some processors write through a mask ten times as slowly.
PACELINE_INLINE Floats load_first(const float* p, Index n) { return n >= kWidth ? load(p) : load(p, first(n)); }
PACELINE_INLINE void store_first(float* p, Floats x, Index n) {
  if (n >= kWidth) {
    store(p, x);
  } else {
    store(p, x, first(n));
  }
}

// Reads and writes that may be of any type and alignment.
PACELINE_INLINE int32_t read_int(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// Says that x is in a register here. Without it GCC 12 keeps a second copy of integer sums on the stack and writes it
// at every step, which halves the speed of the wide tiles.
PACELINE_INLINE void keep(Ints& x) { asm("" : "+v"(x)); }
PACELINE_INLINE void keep(Floats& x) { asm("" : "+v"(x)); }

constexpr float kInfinity = __builtin_inff();

// e ** r * 2 ** n for |r| <= ln 2 / 2 and whole n: the Taylor polynomial of degree 7.
PACELINE_INLINE Floats exponential_of_rest(Floats r, Floats n) {
  Floats p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  return mul(p, power_of_two(to_ints(n)));
}

// e ** x within 2 units in the last place; 0 below -87.3 (results would be subnormal), infinity above 88.7, NaN of NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2.
PACELINE_INLINE Floats exponential(Floats x) {
  const Floats low = all(-87.3f), high = all(88.72283f);
  // The constant comes first: min and max then hand a NaN through.
  const Floats safe = min(high, max(low, x));
  const Floats n = min(all(127.0f), round_even(mul(safe, all(1.44269504088896341f))));
  Floats r = fnma(n, all(0.693359375f), safe);
  r = fnma(n, all(-2.12194440e-4f), r);
  const Floats scaled = exponential_of_rest(r, n);
  return select(less(x, low), zeros(), select(less(high, x), all(kInfinity), scaled));
}

// tanh within 4 units in the last place of 1; by the odd series where 1 - e ** (-2 |x|) would cancel.
PACELINE_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats size = absolute(x);
  const Floats decay = exponential(mul(size, all(-2.0f)));
  const Floats far = div(sub(all(1.0f), decay), add(all(1.0f), decay));
  const Floats signed_far = select(less(x, zeros()), sub(zeros(), far), far);
  const Floats square = mul(x, x);
  Floats series = all(-17.0f / 315);
  series = fma(series, square, all(2.0f / 15));
  series = fma(series, square, all(-1.0f / 3));
  series = fma(series, square, all(1.0f));
  return select(less(size, all(0.15f)), mul(x, series), signed_far);
}

PACELINE_INLINE Floats activate(Floats x, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return div(x, add(all(1.0f), exponential(sub(zeros(), x))));
    case Activation::kGeluTanh: {
      const Floats cube = mul(mul(x, x), x);
      const Floats inner = mul(all(0.7978845608028654f), fma(all(0.044715f), cube, x));
      return mul(mul(all(0.5f), x), add(all(1.0f), hyperbolic_tangent(inner)));
    }
    case Activation::kRelu: return max(zeros(), x);
    case Activation::kNone: break;
  }
  return x;
}
