#include "layer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "pool.h"

namespace paceline {
namespace {

void expect(const char* what, int64_t found, int64_t expected) {
  if (found != expected) {
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(found) + "; " + std::to_string(expected) +
                                " was expected");
  }
}

// Rows of activations, `stride` apart.
struct Rows {
  float* data;
  int64_t stride, count;
};

// The part of the workspace that a layer uses.
struct Buffers {
  float* mixed;  // [tokens, heads * head_dim]
  float* qkv;    // [tokens, (heads + 2 kv_heads) * head_dim]; after attention, free for the rows of `mixed` wanted
  float* inner;  // [rows, inner]: in the place of both, which are not needed any more
};

int64_t mixed_width(const DecoderLayer& layer) { return layer.heads * layer.head_dim; }

// Memory of the calling thread, as large as the largest layer of its largest batch so far.
Buffers buffers(const LayersCall& call, const DecoderLayer& layer) {
  static thread_local Scratch kept;
  const int64_t tokens = call.batch.tokens, most = std::max(tokens, call.wanted_count), mixed = mixed_width(layer);
  const int64_t both = tokens * mixed + std::max(tokens * layer.qkv.shape().outputs, call.wanted_count * mixed);
  float* const memory = kept.floats(std::max(both, most * layer.down.shape().in_features));
  return {memory, memory + tokens * mixed, memory};
}

// Row by row: heads are normalized if the layer does so, rotated, and their keys and values put into the pool.
void turn_heads(const LayersCall& call, const DecoderLayer& layer, const PagedCall& paged, float* qkv) {
  const Kernels& isa = kernels();
  const int64_t rotating = layer.heads + layer.kv_heads, width = paged.q_stride;
  const RopeJob rope{qkv, width, rotating, layer.head_dim, call.cosine, call.sine, call.angle_stride, call.rotary};
  RowsJob norm{};
  norm.x_stride = norm.y_stride = norm.weight_stride = norm.columns = layer.head_dim;
  norm.weight = layer.qk_norm.data();
  norm.eps = layer.qk_eps;
  over_rows(call.batch.tokens, width, [&](int64_t low, int64_t high) {
    for (int64_t t = low; t < high; ++t) {
      if (!layer.qk_norm.empty()) {
        RowsJob heads = norm;
        heads.x = heads.y = qkv + t * width;
        isa.rms_norm(heads, 0, rotating);
      }
      isa.rope(rope, t, t + 1);
      write_kv(paged, t, t + 1);
    }
  });
}

// hidden -> mixed, the result of attention before `out`.
void mix(const LayersCall& call, const DecoderLayer& layer, const PagedPool& pool, const Buffers& space) {
  const int64_t width = layer.qkv.shape().outputs;
  layer.qkv.apply({call.hidden, call.hidden_stride, call.batch.tokens, Activation::kNone, nullptr, 0, space.qkv, width,
                   layer.attention_norm.data(), layer.eps});
  PagedCall paged{};
  paged.pool = pool;
  paged.batch = call.batch;
  paged.heads = layer.heads;
  paged.q = space.qkv;
  paged.k = paged.q + layer.heads * layer.head_dim;
  paged.v = paged.k + layer.kv_heads * layer.head_dim;
  paged.q_stride = paged.k_stride = paged.v_stride = width;
  paged.out = space.mixed;
  paged.out_stride = mixed_width(layer);
  paged.scale = layer.scale;
  paged.window = layer.window;
  turn_heads(call, layer, paged, space.qkv);
  attend(paged);
}

// hidden += out(mixed); hidden += down(act(gate) * up), with `mixed` dense.
void finish(const DecoderLayer& layer, const float* mixed, Rows hidden, float* inner) {
  const int64_t inner_width = layer.down.shape().in_features;
  layer.out.apply({mixed, mixed_width(layer), hidden.count, Activation::kNone, hidden.data, hidden.stride, hidden.data,
                   hidden.stride});
  layer.gate_up.apply({hidden.data, hidden.stride, hidden.count, layer.activation, nullptr, 0, inner, inner_width,
                       layer.mlp_norm.data(), layer.eps});
  layer.down.apply(
      {inner, inner_width, hidden.count, Activation::kNone, hidden.data, hidden.stride, hidden.data, hidden.stride});
}

void gather(const float* from, int64_t stride, int64_t columns, const LayersCall& call, Rows to) {
  for (int64_t i = 0; i < to.count; ++i) {
    std::memcpy(to.data + i * to.stride, from + call.wanted[i] * stride, static_cast<size_t>(columns) * sizeof(float));
  }
}

}  // namespace

void check_layer(const DecoderLayer& layer) {
  if (layer.heads < 1 || layer.kv_heads < 1 || layer.heads % layer.kv_heads) {
    throw std::invalid_argument("heads is " + std::to_string(layer.heads) + "; it must be a multiple of kv_heads, " +
                                std::to_string(layer.kv_heads));
  }
  if (layer.head_dim < 1) throw std::invalid_argument("head_dim must be at least 1");
  if (layer.window < 1) throw std::invalid_argument("window must be at least 1");
  const LinearShape &qkv = layer.qkv.shape(), &out = layer.out.shape();
  const LinearShape &gate_up = layer.gate_up.shape(), &down = layer.down.shape();
  if (!gate_up.gated) throw std::invalid_argument("gate_up must be packed with gated=True");
  if (qkv.gated || out.gated || down.gated) throw std::invalid_argument("of the maps, gate_up alone is gated");
  const int64_t hidden = layer.hidden(), rotating = layer.heads + layer.kv_heads;
  expect("the number of outputs of qkv", qkv.outputs, (rotating + layer.kv_heads) * layer.head_dim);
  expect("the number of inputs of out", out.in_features, mixed_width(layer));
  expect("the number of outputs of out", out.outputs, hidden);
  expect("the number of inputs of gate_up", gate_up.in_features, hidden);
  expect("the number of inputs of down", down.in_features, gate_up.outputs);
  expect("the number of outputs of down", down.outputs, hidden);
  expect("the size of attention_norm", static_cast<int64_t>(layer.attention_norm.size()), hidden);
  expect("the size of mlp_norm", static_cast<int64_t>(layer.mlp_norm.size()), hidden);
  if (!layer.qk_norm.empty()) {
    expect("the size of qk_norm", static_cast<int64_t>(layer.qk_norm.size()), rotating * layer.head_dim);
  }
}

void run_layers(const LayersCall& call) {
  check_batch(call.batch, call.pools.front().blocks, call.pools.front().block_size);
  for (int64_t i = 0; i < call.wanted_count; ++i) {
    if (call.wanted[i] < 0 || call.wanted[i] >= call.batch.tokens) {
      throw std::invalid_argument("wanted names token " + std::to_string(call.wanted[i]) + " of " +
                                  std::to_string(call.batch.tokens));
    }
  }
  const Rows all{call.hidden, call.hidden_stride, call.batch.tokens};
  for (size_t i = 0; i < call.layers.size(); ++i) {
    const DecoderLayer& layer = *call.layers[i];
    const Buffers space = buffers(call, layer);
    mix(call, layer, call.pools[i], space);
    if (call.selects && i + 1 == call.layers.size()) {
      const Rows result{call.result, call.result_stride, call.wanted_count};
      gather(call.hidden, call.hidden_stride, layer.hidden(), call, result);
      gather(space.mixed, mixed_width(layer), mixed_width(layer), call,
             {space.qkv, mixed_width(layer), call.wanted_count});
      finish(layer, space.qkv, result, space.inner);
    } else {
      finish(layer, space.mixed, all, space.inner);
    }
  }
}

}  // namespace paceline
