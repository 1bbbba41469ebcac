// Numbers of fewer bits: float16, bfloat16, and groups of int4 weights.
#pragma once

#include <cstdint>

namespace paceline {

uint16_t to_float16(float x);
float from_float16(uint16_t bits);

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t to_bfloat16(float x);
float from_bfloat16(uint16_t half);

// One group of a channel of int4 weights.
struct Int4Group {
  uint8_t q[128];
  uint16_t scale, minimum;  // float16
};

// A scale as float16. Raises std::invalid_argument where that is infinite, which would make its weights NaN, or zero,
// which would lose them.
uint16_t checked_scale(float scale);

// Minimums may be as small as they like: beside them, zero is as good.
uint16_t checked_minimum(float minimum);

// `count` weights, `group` places: the rest is what a weight of zero would be, and meets activations of zero. Raises
// std::invalid_argument for weights that are not finite or do not fit.
void quantize_group(const float* w, int64_t count, int64_t group, bool with_minimum, Int4Group& out);

}  // namespace paceline
