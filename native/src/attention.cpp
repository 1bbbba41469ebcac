#include "attention.h"

#include <algorithm>
#include <vector>

#include "cpu.h"
#include "pool.h"

namespace paceline {
namespace {

// Query columns (queries times the heads of a group) of one piece: keys are gathered once for all of them.
constexpr int64_t kColumns = 128;
// A decode is split over its context where there would otherwise be too few pieces, into spans no shorter than this.
constexpr int64_t kShortestSpan = 256;
constexpr int64_t kPiecesPerThread = 4;

struct Merge {
  AttentionPiece whole;
  int64_t first, count;  // partial results [first, first + count)
};

struct Decode {
  AttentionPiece piece;
  int64_t partial;  // the number of its partial result, or -1
};

// Kept by its thread from call to call, so that what it needs is allocated once.
struct Plan {
  std::vector<AttentionPiece> chunks;
  std::vector<Decode> decodes;
  std::vector<Merge> merges;
  int64_t partials, partial_floats;
  Scratch partial_results;
};

// How decodes are cut: into key heads and spans of keys, no more than keeps every thread busy.
struct Cut {
  int64_t kv_heads, span;
};

Cut decode_cut(const AttentionJob& job, const AttentionRows& rows, int threads) {
  int64_t keys = 0, decodes = 0, longest = 1;
  for (int64_t r = 0; r < rows.rows; ++r) {
    if (rows.row_starts[r + 1] - rows.row_starts[r] != 1) continue;
    const int64_t context = std::min(rows.context_lens[r], job.window);
    ++decodes;
    keys += context;
    longest = std::max(longest, context);
  }
  if (threads == 1) return {job.pool.kv_heads, longest};
  const int64_t pieces = kPiecesPerThread * threads, heads = decodes >= pieces ? job.pool.kv_heads : 1;
  return {heads, std::max(kShortestSpan, keys * (job.pool.kv_heads / heads) / pieces)};
}

void plan_decode(const AttentionPiece& whole, int64_t span, Plan& plan) {
  const int64_t keys = whole.key_high - whole.key_low, parts = std::max<int64_t>(1, (keys + span - 1) / span);
  if (parts > 1) plan.merges.push_back({whole, plan.partials, parts});
  for (int64_t i = 0; i < parts; ++i) {
    AttentionPiece piece = whole;
    piece.key_low = whole.key_low + i * keys / parts;
    piece.key_high = whole.key_low + (i + 1) * keys / parts;
    plan.decodes.push_back({piece, parts > 1 ? plan.partials++ : -1});
  }
}

void make_plan(const AttentionJob& job, const AttentionRows& rows, int threads, Plan& plan) {
  plan.chunks.clear();
  plan.decodes.clear();
  plan.merges.clear();
  plan.partials = 0;
  const Cut cut = decode_cut(job, rows, threads);
  const int64_t queries = std::max<int64_t>(1, kColumns / job.group);
  plan.partial_floats = cut.kv_heads * job.group * (2 + job.pool.v_dim);
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t first = rows.row_starts[r], count = rows.row_starts[r + 1] - first, context = rows.context_lens[r];
    for (int64_t done = 0; done < count; done += queries) {
      AttentionPiece piece{};
      piece.row = r;
      piece.token = first + done;
      piece.count = std::min(queries, count - done);
      piece.position = context - count + done;
      piece.key_low = std::max<int64_t>(0, piece.position + 1 - job.window);
      piece.key_high = piece.position + piece.count;
      piece.kv_heads = count == 1 ? cut.kv_heads : 1;
      for (piece.kv_head = 0; piece.kv_head < job.pool.kv_heads; piece.kv_head += piece.kv_heads) {
        if (count == 1) {
          plan_decode(piece, cut.span, plan);
        } else {
          plan.chunks.push_back(piece);
        }
      }
    }
  }
  // The longest first: what is left at the end is then short.
  std::sort(plan.chunks.begin(), plan.chunks.end(), [](const AttentionPiece& a, const AttentionPiece& b) {
    return a.count * (a.key_high - a.key_low) > b.count * (b.key_high - b.key_low);
  });
}

}  // namespace

void attend(const AttentionJob& job, const AttentionRows& rows) {
  const Kernels& isa = kernels();
  static thread_local Plan kept;
  Plan& plan = kept;  // what other threads see of it, too
  make_plan(job, rows, pool_threads(), plan);
  const int64_t partial_floats = plan.partial_floats;
  float* const partials = plan.partial_results.floats(plan.partials * partial_floats);
  for (Decode& decode : plan.decodes) {
    if (decode.partial >= 0) decode.piece.partial = partials + decode.partial * partial_floats;
  }
  const int64_t most_queries = std::max<int64_t>(1, kColumns / job.group);
  const int64_t scratch = isa.attention_scratch(job, most_queries);
  const int64_t chunks = static_cast<int64_t>(plan.chunks.size());
  parallel(chunks + static_cast<int64_t>(plan.decodes.size()), [&](int64_t item) {
    if (item < chunks) {
      isa.attend_chunk(job, plan.chunks[static_cast<size_t>(item)], thread_scratch(scratch));
    } else {
      const auto number = static_cast<size_t>(item - chunks);
      const AttentionPiece* next = number + 1 < plan.decodes.size() ? &plan.decodes[number + 1].piece : nullptr;
      isa.attend_decode(job, plan.decodes[number].piece, next, thread_scratch(scratch));
    }
  });
  for (const Merge& merge : plan.merges) {
    isa.merge_decode(job, merge.whole, partials + merge.first * partial_floats, merge.count);
  }
}

}  // namespace paceline
