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
  int64_t token, kv_head, first, count;  // partial results [first, first + count)
};

struct Decode {
  AttentionPiece piece;
  int64_t partial;  // the number of its partial result, or -1
};

struct Plan {
  std::vector<AttentionPiece> chunks;
  std::vector<Decode> decodes;
  std::vector<Merge> merges;
  int64_t partials = 0;
};

// How many keys a piece of a decode takes: all of them, unless that would leave threads without work.
int64_t decode_span(const AttentionJob& job, const AttentionRows& rows, int threads) {
  int64_t keys = 0, pieces = 0, longest = 0;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t context = std::min(rows.context_lens[r], job.window);
    pieces += job.kv_heads;
    keys += context * job.kv_heads;
    longest = std::max(longest, context);
  }
  if (threads == 1 || pieces == 0) return std::max<int64_t>(longest, 1);
  return std::max(kShortestSpan, keys / (kPiecesPerThread * threads));
}

void plan_decode(const AttentionPiece& whole, int64_t span, Plan& plan) {
  const int64_t keys = whole.key_high - whole.key_low, parts = std::max<int64_t>(1, (keys + span - 1) / span);
  if (parts > 1) plan.merges.push_back({whole.token, whole.kv_head, plan.partials, parts});
  for (int64_t i = 0; i < parts; ++i) {
    AttentionPiece piece = whole;
    piece.key_low = whole.key_low + i * keys / parts;
    piece.key_high = whole.key_low + (i + 1) * keys / parts;
    plan.decodes.push_back({piece, parts > 1 ? plan.partials++ : -1});
  }
}

Plan make_plan(const AttentionJob& job, const AttentionRows& rows, int threads) {
  Plan plan;
  const int64_t span = decode_span(job, rows, threads), queries = std::max<int64_t>(1, kColumns / job.group);
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
      for (piece.kv_head = 0; piece.kv_head < job.kv_heads; ++piece.kv_head) {
        if (count == 1) {
          plan_decode(piece, span, plan);
        } else {
          plan.chunks.push_back(piece);
        }
      }
    }
  }
  // The longest first: what is left at the end is then short.
  std::stable_sort(plan.chunks.begin(), plan.chunks.end(), [](const AttentionPiece& a, const AttentionPiece& b) {
    return a.count * (a.key_high - a.key_low) > b.count * (b.key_high - b.key_low);
  });
  return plan;
}

}  // namespace

void attend(const AttentionJob& job, const AttentionRows& rows) {
  const Kernels& isa = kernels();
  Plan plan = make_plan(job, rows, pool_threads());
  const int64_t partial_floats = job.group * (2 + job.v_dim);
  std::vector<float> partials(static_cast<size_t>(plan.partials * partial_floats));
  for (Decode& decode : plan.decodes) {
    if (decode.partial >= 0) decode.piece.partial = partials.data() + decode.partial * partial_floats;
  }
  const int64_t most_queries = std::max<int64_t>(1, kColumns / job.group);
  const int64_t scratch = isa.attention_scratch(job, most_queries);
  const int64_t chunks = static_cast<int64_t>(plan.chunks.size());
  parallel(chunks + static_cast<int64_t>(plan.decodes.size()), [&](int64_t item) {
    if (item < chunks) {
      isa.attend_chunk(job, plan.chunks[static_cast<size_t>(item)], thread_scratch(scratch));
    } else {
      isa.attend_decode(job, plan.decodes[static_cast<size_t>(item - chunks)].piece, thread_scratch(scratch));
    }
  });
  for (const Merge& merge : plan.merges) {
    isa.merge_decode(job, merge.token, merge.kv_head, partials.data() + merge.first * partial_floats, merge.count);
  }
}

}  // namespace paceline
