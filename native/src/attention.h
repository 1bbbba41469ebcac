// Cuts the attention of a ragged batch into pieces that threads share.
#pragma once

#include <cstdint>

#include "jobs.h"

namespace paceline {

// The rows of a batch: row r owns tokens row_starts[r] to row_starts[r + 1], the last of its context_lens[r] positions.
struct AttentionRows {
  const int64_t* row_starts;    // [rows + 1]
  const int64_t* context_lens;  // [rows]
  int64_t rows;
};

// `job` with every field set; keys and values of the batch are in their blocks already.
void attend(const AttentionJob& job, const AttentionRows& rows);

}  // namespace paceline
