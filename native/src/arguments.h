// What several bindings take alike: names of activations, pools, ragged batches.
#pragma once

#include <string>

#include "jobs.h"
#include "paged.h"
#include "tensor.h"

namespace paceline {

// Raises ValueError for a name that is none.
Activation activation_of(const std::string& name);

// A layer's keys and values, and what keeps them alive for the time of a call.
struct PoolArgument {
  View keys, values, key_scales, value_scales;
  PagedPool pool;
};

// `keys` [blocks, block_size, kv_heads, k_dim] and `values` [..., v_dim], both of one type; of int8, and of nothing else,
// the scales are given as well: float32 [blocks, block_size, kv_heads]. Raises TypeError or ValueError.
PoolArgument pool_argument(nanobind::handle keys, nanobind::handle values, nanobind::handle key_scales,
                           nanobind::handle value_scales);

struct BatchArgument {
  View slots, tables, row_starts, context_lens;
  PagedBatch batch;
};

// Sizes are checked here; what the tensors hold is for `check_batch`. Raises TypeError or ValueError.
BatchArgument batch_argument(nanobind::handle slots, nanobind::handle tables, nanobind::handle row_starts,
                             nanobind::handle context_lens, int64_t tokens);

// Of `tokens` positions, for heads of `head_dim` features; both lie alike in memory.
struct AngleArgument {
  View cosine, sine;  // [tokens, rotary]
};

// Raises TypeError or ValueError.
AngleArgument angle_argument(nanobind::handle cosine, nanobind::handle sine, int64_t tokens, int64_t head_dim);

}  // namespace paceline
