#include "paged.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu.h"

namespace paceline {

void check_batch(const PagedBatch& batch, int64_t blocks, int64_t block_size) {
  const AttentionRows& rows = batch.rows;
  if (rows.row_starts[0] != 0 || rows.row_starts[rows.rows] != batch.tokens) {
    throw std::invalid_argument("row_starts must begin with 0 and end with the number of tokens");
  }
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t count = rows.row_starts[r + 1] - rows.row_starts[r], context = rows.context_lens[r];
    if (count < 0 || context < count || context > batch.table_blocks * block_size) {
      throw std::invalid_argument("row " + std::to_string(r) + " has " + std::to_string(count) +
                                  " tokens, a context of " + std::to_string(context) + " and " +
                                  std::to_string(batch.table_blocks) + " blocks");
    }
    for (int64_t i = 0; i * block_size < context; ++i) {
      const int64_t block = batch.tables[r * batch.table_stride + i];
      if (block < 0 || block >= blocks) {
        throw std::invalid_argument("row " + std::to_string(r) + " names block " + std::to_string(block) + " of " +
                                    std::to_string(blocks));
      }
    }
  }
  for (int64_t t = 0; t < batch.tokens; ++t) {
    const int64_t slot = batch.slots[t];
    if (slot < 0 || slot >= blocks * block_size) {
      throw std::invalid_argument("slot " + std::to_string(slot) + " is outside the pool");
    }
  }
}

void write_kv(const PagedCall& call, int64_t low, int64_t high) {
  const KvRows rows{call.pool, call.batch.slots, call.k, call.k_stride, call.v, call.v_stride};
  kernels().write_kv(rows, low, high);
}

void attend(const PagedCall& call) {
  AttentionJob job{};
  job.q = call.q;
  job.q_stride = call.q_stride;
  job.out = call.out;
  job.out_stride = call.out_stride;
  job.pool = call.pool;
  job.tables = call.batch.tables;
  job.table_stride = call.batch.table_stride;
  job.group = call.heads / call.pool.kv_heads;
  job.scale = call.scale;
  job.window = std::min(call.window, kNoWindow);
  job.softcap = call.softcap;
  job.sinks = call.sinks;
  attend(job, call.batch.rows);
}

void paged_attention(const PagedCall& call) {
  check_batch(call.batch, call.pool.blocks, call.pool.block_size);
  write_kv(call, 0, call.batch.tokens);
  attend(call);
}

}  // namespace paceline
