// What Python sees of layers.
#include "module_layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::vector<float> values_of(const View& view) {
  const float* const first = view.as<float>();
  return std::vector<float>(first, first + view.shape[0] * (view.ndim > 1 ? view.shape[1] : 1));
}

void make_layer(DecoderLayer* self, nb::handle attention_norm, const PackedLinear& qkv, const PackedLinear& out,
                nb::handle mlp_norm, const PackedLinear& gate_up, const PackedLinear& down, double eps, int64_t heads,
                int64_t kv_heads, int64_t head_dim, double scale, std::optional<int64_t> window,
                const std::string& activation, nb::handle qk_norm, std::optional<double> qk_eps) {
  const View heads_norm = optional_view(qk_norm, "qk_norm", Type::kFloat32, 2, 2);
  DecoderLayer layer{values_of(view(attention_norm, "attention_norm", Type::kFloat32, 1)),
                     values_of(view(mlp_norm, "mlp_norm", Type::kFloat32, 1)),
                     {},
                     static_cast<float>(eps),
                     static_cast<float>(qk_eps.value_or(eps)),
                     qkv,
                     out,
                     gate_up,
                     down,
                     activation_of(activation),
                     heads,
                     kv_heads,
                     head_dim,
                     static_cast<float>(scale),
                     window.value_or(kNoWindow)};
  if (!qk_norm.is_none()) {
    expect_size(heads_norm, "qk_norm", 0, heads + kv_heads);
    expect_size(heads_norm, "qk_norm", 1, head_dim);
    layer.qk_norm = values_of(heads_norm);
  }
  check_layer(layer);
  new (self) DecoderLayer(std::move(layer));
}

// As many items as there are layers, all None for None; the tuple holds them for the time of the call.
nb::tuple one_a_layer(nb::handle sequence, const char* name, size_t layers) {
  if (sequence.is_none()) {
    nb::list nothing;
    for (size_t i = 0; i < layers; ++i) nothing.append(nb::none());
    return nb::tuple(nothing);
  }
  nb::tuple items = nb::steal<nb::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!items.is_valid()) throw nb::python_error();
  if (items.size() != layers) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(items.size()) + " items; " +
                           std::to_string(layers) + " were expected, one a layer")
                              .c_str());
  }
  return items;
}

void run(nb::sequence layers, nb::handle hidden, nb::handle cosine, nb::handle sine, nb::handle keys, nb::handle values,
         nb::handle slots, nb::handle tables, nb::handle row_starts, nb::handle context_lens, nb::handle wanted,
         nb::handle out, nb::handle key_scales, nb::handle value_scales) {
  const size_t count = nb::len(layers);
  if (count == 0) throw nb::value_error("layers is empty");
  const nb::tuple layer_items = one_a_layer(layers, "layers", count), key_items = one_a_layer(keys, "keys", count);
  const nb::tuple value_items = one_a_layer(values, "values", count);
  const nb::tuple key_scale_items = one_a_layer(key_scales, "key_scales", count);
  const nb::tuple value_scale_items = one_a_layer(value_scales, "value_scales", count);
  const View hidden_ = view(hidden, "hidden", Type::kFloat32, 2);
  const int64_t tokens = hidden_.shape[0];
  const BatchArgument batch = batch_argument(slots, tables, row_starts, context_lens, tokens);
  const View wanted_ = optional_view(wanted, "wanted", Type::kInt64, 1);
  const View out_ = optional_view(out, "out", Type::kFloat32, 2);
  if (wanted.is_none() != out.is_none()) throw nb::value_error("wanted and out are given together or not at all");

  LayersCall call{};
  std::vector<PoolArgument> held;
  int64_t least_dim = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < count; ++i) {
    DecoderLayer* layer = nullptr;
    if (!nb::try_cast(layer_items[i], layer, false) || !layer) {
      throw nb::type_error("layers must hold instances of DecoderLayer alone");
    }
    expect_size(hidden_, "hidden", 1, layer->hidden());
    held.push_back(pool_argument(key_items[i], value_items[i], key_scale_items[i], value_scale_items[i]));
    const PoolArgument& pool = held.back();
    for (int axis = 0; axis < 2; ++axis) expect_size(pool.keys, "keys", axis, held.front().keys.shape[axis]);
    expect_size(pool.keys, "keys", 2, layer->kv_heads);
    expect_size(pool.keys, "keys", 3, layer->head_dim);
    expect_size(pool.values, "values", 3, layer->head_dim);
    least_dim = std::min(least_dim, layer->head_dim);
    call.layers.push_back(layer);
    call.pools.push_back(pool.pool);
  }
  const AngleArgument angles = angle_argument(cosine, sine, tokens, least_dim);
  if (!wanted.is_none()) {
    expect_size(out_, "out", 0, wanted_.shape[0]);
    expect_size(out_, "out", 1, hidden_.shape[1]);
    call.selects = true;
    call.wanted = wanted_.as<int64_t>();
    call.wanted_count = wanted_.shape[0];
    call.result = out_.as<float>();
    call.result_stride = out_.stride[0];
  }
  call.batch = batch.batch;
  call.hidden = hidden_.as<float>();
  call.hidden_stride = hidden_.stride[0];
  call.cosine = angles.cosine.as<float>();
  call.sine = angles.sine.as<float>();
  call.angle_stride = angles.cosine.stride[0];
  call.rotary = angles.cosine.shape[1];
  const nb::gil_scoped_release release;
  run_layers(call);
}

}  // namespace

void bind_layers(nb::module_& m) {
  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def("__init__", &make_layer, "attention_norm"_a, "qkv"_a, "out"_a, "mlp_norm"_a, "gate_up"_a, "down"_a,
           nb::kw_only(), "eps"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a = nb::none(),
           "activation"_a = "silu", "qk_norm"_a = nb::none(), "qk_eps"_a = nb::none());
  m.def("run_layers", &run, "layers"_a, "hidden"_a, "cos"_a, "sin"_a, "keys"_a, "values"_a, "slots"_a, "tables"_a,
        "row_starts"_a, "context_lens"_a, "wanted"_a = nb::none(), "out"_a = nb::none(), "key_scales"_a = nb::none(),
        "value_scales"_a = nb::none());
}

}  // namespace paceline
