// The next token of each row: filters and the draw, as runtime/sampling.py defines them.
#pragma once

#include <cstdint>

namespace paceline {

// All arrays but the logits are dense.
struct SampleBatch {
  const float* logits;  // [rows, columns]; not written to
  int64_t logits_stride;
  int64_t rows;
  int64_t columns;
  const double* temperature;  // 0 takes the first of the highest logits
  const int64_t* top_k;       // 0 is off
  const double* top_p;        // 1 is off
  const double* min_p;        // 0 is off
  const double* uniform;      // in [0, 1)
  int64_t* tokens;            // out; -1 where the row holds NaN or +infinity, or nothing but -infinity
  uint8_t* near;              // out; 1 where noise in the logits might have turned the draw
};

void sample(const SampleBatch& batch);

}  // namespace paceline
