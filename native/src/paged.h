// Attention over a pool of blocks as plain pointers: checks, the write of the step's keys and values, the kernels.
#pragma once

#include <cstdint>

#include "attention.h"

namespace paceline {

// As many positions as there may be: no window.
constexpr int64_t kNoWindow = int64_t{1} << 40;

// Where the tokens of a ragged batch stand in a pool; the same for all layers of a step.
struct PagedBatch {
  AttentionRows rows;
  int64_t tokens;
  const int64_t* slots;   // [tokens]: block * block_size + place in it
  const int64_t* tables;  // [rows.rows, table_blocks], rows table_stride apart
  int64_t table_stride, table_blocks;
};

// Strides are those between tokens, in elements; heads and features are dense.
struct PagedCall {
  PagedPool pool;
  PagedBatch batch;
  int64_t heads;   // of q; a multiple of pool.kv_heads
  const float* q;  // [tokens, heads, k_dim]
  int64_t q_stride;
  const float* k;  // [tokens, kv_heads, k_dim]
  int64_t k_stride;
  const float* v;  // [tokens, kv_heads, v_dim]
  int64_t v_stride;
  float* out;  // [tokens, heads, v_dim]
  int64_t out_stride;
  float scale;
  int64_t window;      // positions that a query sees, its own included; kNoWindow: all
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null
};

// Raises std::invalid_argument where rows, tables or slots do not fit each other or a pool of that many blocks.
void check_batch(const PagedBatch& batch, int64_t blocks, int64_t block_size);

// Puts k and v of tokens [low, high) into their slots, rounded to what the pool holds.
void write_kv(const PagedCall& call, int64_t low, int64_t high);

// The kernels alone: the batch is checked, and its keys and values are in the pool.
void attend(const PagedCall& call);

// All three.
void paged_attention(const PagedCall& call);

}  // namespace paceline
