// Decoder layers of the common kind, all of a step in one call: pre-norm, rotary grouped-query attention over paged
// keys and values, gated MLP, residuals.
#pragma once

#include <cstdint>
#include <vector>

#include "jobs.h"
#include "linear.h"
#include "paged.h"

namespace paceline {

struct DecoderLayer {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  std::vector<float> qk_norm;                   // [heads + kv_heads, head_dim], or empty: none
  float eps, qk_eps;
  PackedLinear qkv, out;       // hidden -> (heads + 2 kv_heads) * head_dim; heads * head_dim -> hidden
  PackedLinear gate_up, down;  // hidden -> inner, gated; inner -> hidden
  Activation activation;
  int64_t heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // kNoWindow: none

  int64_t hidden() const { return qkv.shape().in_features; }
};

// Raises std::invalid_argument, which names the part, where parts of a layer do not fit each other.
void check_layer(const DecoderLayer& layer);

struct LayersCall {
  std::vector<const DecoderLayer*> layers;
  std::vector<PagedPool> pools;  // one a layer, with as many blocks, of the same size
  PagedBatch batch;
  float* hidden;  // [batch.tokens, hidden], changed in place
  int64_t hidden_stride;
  const float* cosine;  // [batch.tokens, rotary]
  const float* sine;
  int64_t angle_stride, rotary;
  // Only the tokens `wanted` are asked for: what the last layer does after attention is done for these alone, and goes
  // to `result` [wanted_count, hidden]; `hidden` stays what that layer was given.
  bool selects;
  const int64_t* wanted;
  int64_t wanted_count;
  float* result;
  int64_t result_stride;
};

// Raises std::invalid_argument where the batch or `wanted` name what is not there.
void run_layers(const LayersCall& call);

}  // namespace paceline
