// What the instruction-set specific code takes: plain structs and one table of functions for each instruction set.
// Included by files that are compiled for different processors, so nothing here may be an inline function: the linker
// keeps one copy of those, and it could be the one that this processor cannot run.
#pragma once

#include <cstdint>

namespace paceline {

enum class WeightKind : int { kFloat32, kBFloat16, kInt8, kInt4 };
enum class Activation : int { kNone, kSilu, kGeluTanh, kRelu };

// y [rows, outputs] = epilogue(x [rows, in] W^T), W [channels, in] packed in panels of `Kernels::panel` channels.
//
// Rows are taken in blocks of at most `Kernels::block_rows(kind)`; `prepare` lays a block out as its inner loop reads
// it: float32 [k][rows of the block], int8 [k / 4][rows of the block][4]. `multiply` then takes a rectangle of blocks
// and panels. With `gated`, panels 2p and 2p + 1 hold gate and up of the same outputs: y = act(gate) * up.
struct LinearJob {
  WeightKind kind;
  const uint8_t* weight;  // panels, each `panel_bytes` long
  int64_t panel_bytes;
  int64_t panels;
  int64_t in_features;
  int64_t depth;               // in_features, padded to what the layout needs
  int64_t outputs;             // columns of y
  int64_t group;               // int4: inputs that share a scale
  bool has_minimum;            // int4: w = scale * q + minimum; else scale * (q - 8)
  const float* channel_scale;  // int8: [panels * panel]
  const float* bias;           // [panels * panel] or null
  bool gated;
  Activation activation;

  const float* x;
  int64_t x_stride;
  int64_t rows;
  int64_t blocks;     // row block b holds rows [b * rows / blocks, (b + 1) * rows / blocks)
  uint8_t* prepared;  // `Kernels::prepared_row_bytes` a row; null where x itself is what the inner loop reads
  float* row_scale;   // int8, int4: [rows][depth / group]
  // int8, int4: [rows][depth / group]. With minimums, the row's scale times the sum of the group's quantized
  // activations; without, an int32: what the group's sum of products starts with.
  float* row_sum;
  const float* residual;  // added to y after the activation; may be y itself
  int64_t residual_stride;
  float* y;
  int64_t y_stride;
};

// What a pool's elements are. Of int8, a scale for each token and head tells what one is worth.
enum class PoolKind : int { kFloat32, kBFloat16, kFloat16, kInt8 };

// The keys and values of one layer: [blocks, block_size, kv_heads, k_dim] and [..., v_dim], dense.
struct PagedPool {
  PoolKind kind;
  void* keys;
  void* values;
  float* key_scales;  // [blocks, block_size, kv_heads]; null unless int8
  float* value_scales;
  int64_t blocks, block_size, kv_heads, k_dim, v_dim;
};

// Keys and values of tokens, on their way to their slots. Heads and features are dense.
struct KvRows {
  PagedPool pool;
  const int64_t* slots;  // [T]: block * block_size + place in it
  const float* k;        // [T, kv_heads, k_dim]
  int64_t k_stride;
  const float* v;  // [T, kv_heads, v_dim]
  int64_t v_stride;
};

// Attention of a ragged batch over paged keys and values; see attention.h for the split into pieces of work.
struct AttentionJob {
  const float* q;  // [T, heads, k_dim], heads and features dense
  int64_t q_stride;
  float* out;  // [T, heads, v_dim]
  int64_t out_stride;
  PagedPool pool;
  const int64_t* tables;  // [rows, table_stride]
  int64_t table_stride;
  int64_t group;  // query heads that share a key head
  float scale;
  int64_t window;      // positions that a query sees, its own included; a huge number where there is no window
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null
};

// Queries [first, first + count) of one row (counted from the row's first token), for key heads [kv_head, kv_head +
// kv_heads), over keys [key_low, key_high). Writes `out`, or its partial result where `partial` is given. Pieces of
// several queries have one key head.
struct AttentionPiece {
  int64_t row;
  int64_t token;  // of query `first`, in [T] tensors
  int64_t count;
  int64_t position;  // of query `first` in its sequence
  int64_t kv_head;
  int64_t kv_heads;
  int64_t key_low;
  int64_t key_high;
  float* partial;  // [kv_heads * group][2 + v_dim]: maximum, sum, weighted values; null where the piece is the whole
                   // decode
};

struct RowsJob {
  const float* x;
  int64_t x_stride;
  float* residual;  // rms_norm: x is added to it first, and the sum is what is normalized; or null
  int64_t residual_stride;
  const float* weight;
  int64_t columns;
  float eps;
  float* y;
  int64_t y_stride;
  int64_t weight_stride;  // rms_norm: 0 where all rows have the same weight
};

struct RopeJob {
  float* x;  // [T, heads, head_dim], rotated in place
  int64_t x_stride;
  int64_t heads;
  int64_t head_dim;
  const float* cosine;  // [T, rotary_dim]
  const float* sine;
  int64_t angle_stride;
  int64_t rotary_dim;
};

// Sampling: a token weighs e ** ((x - best) / temperature). `inverse` + `rest` is 1 / temperature.
struct WeightScale {
  float best;
  float inverse;
  float rest;
};
constexpr int64_t kSampleBlock = 64;  // logits that share a maximum
constexpr int64_t kSampleSpan = 512;  // tokens whose weights are added up together

struct Kernels {
  const char* name;
  int64_t panel;        // channels of a weight panel
  int64_t int8_offset;  // added to int8 weights when they are packed
  int64_t query_panel;  // queries that attention takes side by side

  int64_t (*block_rows)(WeightKind);  // most rows of a block
  void (*prepare)(const LinearJob&, int64_t block);
  void (*multiply)(const LinearJob&, int64_t block_low, int64_t block_high, int64_t panel_low, int64_t panel_high);
  void (*write_kv)(const KvRows&, int64_t low, int64_t high);  // tokens [low, high)
  int64_t (*attention_scratch)(const AttentionJob&, int64_t most_queries);  // floats
  void (*attend_chunk)(const AttentionJob&, const AttentionPiece&, float* scratch);
  // `next` is what this thread will most likely take after the piece, or null.
  void (*attend_decode)(const AttentionJob&, const AttentionPiece&, const AttentionPiece* next, float* scratch);
  void (*merge_decode)(const AttentionJob&, const AttentionPiece&, const float* partials, int64_t count);
  void (*rms_norm)(const RowsJob&, int64_t row_low, int64_t row_high);
  void (*gate)(const RowsJob&, Activation, int64_t row_low, int64_t row_high);
  void (*rope)(const RopeJob&, int64_t row_low, int64_t row_high);
  int64_t (*argmax)(const float* x, int64_t columns);
  float (*row_maxima)(const float* x, int64_t columns, float* maxima);
  void (*weigh)(const float* x, int64_t count, const WeightScale& scale, float* weights);
  void (*weigh_spans)(const float* x, int64_t columns, const WeightScale& scale, double* sums);
  int64_t (*pick)(const float* x, int64_t columns, const float* maxima, float cutoff, int32_t* ids, float* logits);
};

const Kernels& kernels_avx2();
const Kernels& kernels_avx2_vnni();
const Kernels& kernels_avx512();

}  // namespace paceline
