#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace paceline {

uint16_t to_float16(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

float from_float16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof bits);
  return static_cast<float>(half);
}

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint16_t checked_scale(float scale) {
  const uint16_t bits = to_float16(scale);
  if (!std::isfinite(scale) || (bits & 0x7fff) >= 0x7c00 || ((bits & 0x7fff) == 0 && scale != 0)) {
    throw std::invalid_argument("int4 weights have a scale or minimum of " + std::to_string(scale) +
                                ", which float16 does not hold");
  }
  return bits;
}

uint16_t checked_minimum(float minimum) {
  const uint16_t bits = to_float16(minimum);
  return (bits & 0x7fff) == 0 ? bits : checked_scale(minimum);
}

namespace {

uint8_t nearest(float x) { return static_cast<uint8_t>(std::clamp(std::nearbyint(x), 0.0f, 15.0f)); }

}  // namespace

void quantize_group(const float* w, int64_t count, int64_t group, bool with_minimum, Int4Group& out) {
  float low = 0, high = 0, most = 0;  // most: the largest magnitude with its sign
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(w[i])) throw std::invalid_argument("weights are not finite");
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
    if (std::fabs(w[i]) > std::fabs(most)) most = w[i];
  }
  // 16 levels over the range; without a minimum, -8 steps reach the largest magnitude, whichever its sign.
  float scale = with_minimum ? (high - low) / 15.0f : most / -8.0f;
  if ((to_float16(scale) & 0x7fff) == 0) scale = 0;  // such weights are zero beside any others
  out.scale = checked_scale(scale);
  out.minimum = with_minimum ? checked_minimum(low) : 0;
  const float step = from_float16(out.scale), base = with_minimum ? from_float16(out.minimum) : 0;
  for (int64_t i = 0; i < group; ++i) {
    const float value = i < count ? w[i] : 0;
    out.q[i] = step == 0 ? (with_minimum ? 0 : 8) : nearest((value - base) / step + (with_minimum ? 0.0f : 8.0f));
  }
}

}  // namespace paceline
