// What keys and values are kept as: from and to float32, a register at a time. After vec.h and prepare.h.
#pragma once

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Where elements have a scale for each token and head.
template <class Element>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<int8_t> = true;

// Calls function(Element()) for the type that the pool has.
template <class Function>
PACELINE_INLINE void of_kind(PoolKind kind, const Function& function) {
  switch (kind) {
    case PoolKind::kFloat32: return function(float());
    case PoolKind::kBFloat16: return function(BFloat16());
    case PoolKind::kFloat16: return function(Float16());
    case PoolKind::kInt8: return function(int8_t());
  }
}

PACELINE_INLINE Floats widen(const float* p) { return load(p); }
PACELINE_INLINE Floats widen(const BFloat16* p) { return load_bfloat16(&p->bits); }
PACELINE_INLINE Floats widen(const Float16* p) { return load_float16(&p->bits); }
PACELINE_INLINE Floats widen(const int8_t* p) { return load_int8(p); }

// The first n, and zeros.
template <class Element>
PACELINE_INLINE Floats widen(const Element* p, Index n) {
  if (n >= kWidth) return widen(p);
  Element some[kWidth] = {};
  __builtin_memcpy(some, p, static_cast<size_t>(n) * sizeof(Element));
  return widen(some);
}
PACELINE_INLINE Floats widen(const float* p, Index n) { return load(p, first(n)); }

// `count` elements times their scale, as float32.
template <class Element>
PACELINE_INLINE void widen_row(const Element* from, Index count, float scale, float* to) {
  const auto scaled = [&](Floats x) __attribute__((always_inline)) {
    return kScaled<Element> ? mul(x, all(scale)) : x;
  };
  Index d = 0;
  for (; d + kWidth <= count; d += kWidth) store(to + d, scaled(widen(from + d)));
  if (d < count) store(to + d, scaled(widen(from + d, count - d)), first(count - d));
}

// x [count] as elements, rounded to the nearest, ties to even; returns their scale, where they have one.
PACELINE_INLINE float narrow_row(const float* x, Index count, float* to) {
  __builtin_memcpy(to, x, static_cast<size_t>(count) * sizeof(float));
  return 1.0f;
}

PACELINE_INLINE float narrow_row(const float* x, Index count, BFloat16* to) {
  for (Index d = 0; d < count; ++d) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + d, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to[d].bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : nearest);
  }
  return 1.0f;
}

PACELINE_INLINE float narrow_row(const float* x, Index count, Float16* to) {
  for (Index d = 0; d < count; ++d) {
    const _Float16 nearest = static_cast<_Float16>(x[d]);
    __builtin_memcpy(&to[d].bits, &nearest, sizeof nearest);
  }
  return 1.0f;
}

PACELINE_INLINE float narrow_row(const float* x, Index count, int8_t* to) {
  const Quantizer found = quantizer(largest_bits(x, count));
  int8_t bytes[16];
  for (Index d = 0; d < count; d += kWidth) {
    quantize_vector(x + d, count - d, all(found.inverse), bytes);
    __builtin_memcpy(to + d, bytes, static_cast<size_t>(count - d < kWidth ? count - d : kWidth));
  }
  return found.scale;
}

// Heads [kv_heads][dim] of one token into its slot.
template <class Element>
PACELINE_INLINE void write_heads(const float* x, Index dim, Index kv_heads, Index slot, void* pool, float* scales) {
  Element* to = static_cast<Element*>(pool) + slot * kv_heads * dim;
  for (Index head = 0; head < kv_heads; ++head) {
    const float scale = narrow_row(x + head * dim, dim, to + head * dim);
    if constexpr (kScaled<Element>) scales[slot * kv_heads + head] = scale;
  }
}

void write_kv(const KvRows& rows, int64_t low, int64_t high) {
  const PagedPool& pool = rows.pool;
  of_kind(pool.kind, [&](auto element) __attribute__((always_inline)) {
    using Element = decltype(element);
    for (Index t = low; t < high; ++t) {
      const Index slot = rows.slots[t];
      write_heads<Element>(rows.k + t * rows.k_stride, pool.k_dim, pool.kv_heads, slot, pool.keys, pool.key_scales);
      write_heads<Element>(rows.v + t * rows.v_stride, pool.v_dim, pool.kv_heads, slot, pool.values, pool.value_scales);
    }
  });
}
