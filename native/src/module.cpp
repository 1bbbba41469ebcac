// What Python sees. Every call checks its arguments, releases the GIL and hands plain structs to the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "arguments.h"
#include "cpu.h"
#include "linear.h"
#include "module_layer.h"
#include "module_sample.h"
#include "paged.h"
#include "pool.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

constexpr const char* kKinds[] = {"float32", "bfloat16", "int8", "int4"};

WeightKind kind_of(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kKinds[i]) return static_cast<WeightKind>(i);
  }
  throw nb::value_error(("kind '" + name + "' is not one of float32, bfloat16, int8, int4").c_str());
}

LinearShape linear_shape(WeightKind kind, const View& weight, bool gated, int64_t group) {
  LinearShape shape;
  shape.kind = kind;
  shape.in_features = weight.shape[1];
  if (gated && weight.shape[0] % 2) throw nb::value_error("a gated map has an even number of channels, gate before up");
  shape.outputs = gated ? weight.shape[0] / 2 : weight.shape[0];
  shape.gated = gated;
  if (kind == WeightKind::kInt4 || kind == WeightKind::kInt8) shape.group = group;
  return shape;
}

View bias_view(nb::handle bias, const View& weight) {
  View found = optional_view(bias, "bias", Type::kFloat32, 1);
  if (found.data) expect_size(found, "bias", 0, weight.shape[0]);
  return found;
}

PackedLinear pack(nb::handle weight, const std::string& kind, nb::handle bias, bool gated, std::optional<int64_t> group,
                  bool minimum) {
  const View w = view(weight, "weight", Type::kFloat32, 2), b = bias_view(bias, w);
  const WeightKind chosen = kind_of(kind);
  LinearShape shape = linear_shape(chosen, w, gated, group.value_or(chosen == WeightKind::kInt8 ? 64 : 32));
  shape.has_minimum = minimum && shape.kind == WeightKind::kInt4;
  const nb::gil_scoped_release release;
  return PackedLinear::pack(shape, w.as<float>(), w.stride[0], b.as<float>());
}

PackedLinear pack_int8(nb::handle weight, nb::handle scale, int64_t group, nb::handle bias, bool gated) {
  const View w = view(weight, "weight", Type::kInt8, 2), b = bias_view(bias, w);
  const View s = view(scale, "scale", Type::kFloat32, 1);
  expect_size(s, "scale", 0, w.shape[0]);
  const LinearShape shape = linear_shape(WeightKind::kInt8, w, gated, group);
  const nb::gil_scoped_release release;
  return PackedLinear::pack_int8(shape, w.as<int8_t>(), w.stride[0], s.as<float>(), b.as<float>());
}

PackedLinear pack_int4(nb::handle weight, nb::handle scale, nb::handle minimum, int64_t group, nb::handle bias,
                       bool gated) {
  const View w = view(weight, "weight", Type::kUInt8, 2), b = bias_view(bias, w);
  const View s = view(scale, "scale", Type::kFloat32, 2, 2);
  const View m = optional_view(minimum, "minimum", Type::kFloat32, 2, 2);
  const LinearShape shape = linear_shape(WeightKind::kInt4, w, gated, group);
  const int64_t groups = group > 0 ? (w.shape[1] + group - 1) / group : 0;
  expect_size(s, "scale", 0, w.shape[0]);
  expect_size(s, "scale", 1, groups);
  if (m.data) {
    expect_size(m, "minimum", 0, w.shape[0]);
    expect_size(m, "minimum", 1, groups);
  }
  const nb::gil_scoped_release release;
  return PackedLinear::pack_int4(shape, w.as<uint8_t>(), w.stride[0], s.as<float>(), m.as<float>(), b.as<float>());
}

void apply(const PackedLinear& map, nb::handle x, nb::handle out, const std::string& activation, nb::handle residual) {
  const LinearShape& shape = map.shape();
  const View in = view(x, "x", Type::kFloat32, 2), y = view(out, "out", Type::kFloat32, 2);
  const View added = optional_view(residual, "residual", Type::kFloat32, 2);
  expect_size(in, "x", 1, shape.in_features);
  expect_size(y, "out", 0, in.shape[0]);
  expect_size(y, "out", 1, shape.outputs);
  if (added.data) {
    expect_size(added, "residual", 0, in.shape[0]);
    expect_size(added, "residual", 1, shape.outputs);
  }
  const LinearCall call{in.as<float>(),    in.stride[0],    in.shape[0],   activation_of(activation),
                        added.as<float>(), added.stride[0], y.as<float>(), y.stride[0]};
  const nb::gil_scoped_release release;
  map.apply(call);
}

void unpack(const PackedLinear& map, nb::handle out) {
  const View y = view(out, "out", Type::kFloat32, 2, 2);
  expect_size(y, "out", 0, map.shape().channels());
  expect_size(y, "out", 1, map.shape().in_features);
  const nb::gil_scoped_release release;
  map.unpack(y.as<float>());
}

void rows(const PackedLinear& map, nb::handle ids, nb::handle out) {
  const View channels = view(ids, "ids", Type::kInt64, 1), y = view(out, "out", Type::kFloat32, 2);
  expect_size(y, "out", 0, channels.shape[0]);
  expect_size(y, "out", 1, map.shape().in_features);
  const nb::gil_scoped_release release;
  map.rows(channels.as<int64_t>(), channels.shape[0], y.as<float>(), y.stride[0]);
}

nb::dict describe(const PackedLinear& map) {
  const LinearShape& shape = map.shape();
  nb::dict out;
  out["kind"] = kKinds[static_cast<int>(shape.kind)];
  out["isa"] = shape.isa;
  out["in_features"] = shape.in_features;
  out["outputs"] = shape.outputs;
  out["gated"] = shape.gated;
  out["has_bias"] = shape.has_bias;
  out["group"] = shape.group;
  out["has_minimum"] = shape.has_minimum;
  return out;
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(nb::handle self) {
  const PackedLinear& map = nb::cast<const PackedLinear&>(self);
  const size_t bytes = static_cast<size_t>(map.bytes());
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(map.data(), {bytes}, self);
}

PackedLinear restore(const nb::dict& description, nb::handle data) {
  LinearShape shape;
  shape.kind = kind_of(nb::cast<std::string>(description["kind"]));
  shape.isa = nb::cast<std::string>(description["isa"]);
  shape.in_features = nb::cast<int64_t>(description["in_features"]);
  shape.outputs = nb::cast<int64_t>(description["outputs"]);
  shape.gated = nb::cast<bool>(description["gated"]);
  shape.has_bias = nb::cast<bool>(description["has_bias"]);
  shape.group = nb::cast<int64_t>(description["group"]);
  shape.has_minimum = nb::cast<bool>(description["has_minimum"]);
  // Weights that were mapped from a file are read-only, which plain ndarrays refuse.
  auto bytes = nb::cast<nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(data);
  auto* const held = new nb::object(nb::borrow(data));
  std::shared_ptr<void> owner(held, [](void* object) {
    const nb::gil_scoped_acquire acquire;
    delete static_cast<nb::object*>(object);
  });
  return PackedLinear::restore(shape, const_cast<uint8_t*>(bytes.data()), static_cast<int64_t>(bytes.size()), owner);
}

void attention(nb::handle q, nb::handle k, nb::handle v, nb::handle keys, nb::handle values, nb::handle slots,
               nb::handle tables, nb::handle row_starts, nb::handle context_lens, nb::handle out, double scale,
               int64_t window, double softcap, nb::handle sinks, nb::handle key_scales, nb::handle value_scales) {
  const View q_ = view(q, "q", Type::kFloat32, 3, 2), k_ = view(k, "k", Type::kFloat32, 3, 2);
  const View v_ = view(v, "v", Type::kFloat32, 3, 2), out_ = view(out, "out", Type::kFloat32, 3, 2);
  const View sinks_ = optional_view(sinks, "sinks", Type::kFloat32, 1);
  const PoolArgument held = pool_argument(keys, values, key_scales, value_scales);
  const PagedPool& pool = held.pool;
  const int64_t tokens = q_.shape[0], heads = q_.shape[1];
  const BatchArgument batch = batch_argument(slots, tables, row_starts, context_lens, tokens);
  if (pool.kv_heads < 1 || heads < 1 || heads % pool.kv_heads)
    throw nb::value_error("heads of q must be a multiple of those of keys");
  expect_size(q_, "q", 2, pool.k_dim);
  expect_size(k_, "k", 0, tokens);
  expect_size(k_, "k", 1, pool.kv_heads);
  expect_size(k_, "k", 2, pool.k_dim);
  expect_size(v_, "v", 0, tokens);
  expect_size(v_, "v", 1, pool.kv_heads);
  expect_size(v_, "v", 2, pool.v_dim);
  expect_size(out_, "out", 0, tokens);
  expect_size(out_, "out", 1, heads);
  expect_size(out_, "out", 2, pool.v_dim);
  if (sinks_.data) expect_size(sinks_, "sinks", 0, heads);
  if (window < 1) throw nb::value_error("window must be at least 1");
  if (softcap < 0) throw nb::value_error("softcap must be positive; 0 is none");

  PagedCall call{};
  call.pool = pool;
  call.batch = batch.batch;
  call.heads = heads;
  call.q = q_.as<float>();
  call.q_stride = q_.stride[0];
  call.k = k_.as<float>();
  call.k_stride = k_.stride[0];
  call.v = v_.as<float>();
  call.v_stride = v_.stride[0];
  call.out = out_.as<float>();
  call.out_stride = out_.stride[0];
  call.scale = static_cast<float>(scale);
  call.window = window;
  call.softcap = static_cast<float>(softcap);
  call.sinks = sinks_.as<float>();
  const nb::gil_scoped_release release;
  paged_attention(call);
}

void rms_norm(nb::handle x, nb::handle weight, double eps, nb::handle out, nb::handle residual) {
  const View in = view(x, "x", Type::kFloat32, 2), w = view(weight, "weight", Type::kFloat32, 1);
  const View y = view(out, "out", Type::kFloat32, 2), added = optional_view(residual, "residual", Type::kFloat32, 2);
  expect_size(w, "weight", 0, in.shape[1]);
  for (int axis = 0; axis < 2; ++axis) {
    expect_size(y, "out", axis, in.shape[axis]);
    if (added.data) expect_size(added, "residual", axis, in.shape[axis]);
  }
  RowsJob job{};
  job.x = in.as<float>();
  job.x_stride = in.stride[0];
  job.residual = added.as<float>();
  job.residual_stride = added.stride[0];
  job.weight = w.as<float>();
  job.columns = in.shape[1];
  job.eps = static_cast<float>(eps);
  job.y = y.as<float>();
  job.y_stride = y.stride[0];
  const nb::gil_scoped_release release;
  over_rows(in.shape[0], in.shape[1], [&](int64_t low, int64_t high) { kernels().rms_norm(job, low, high); });
}

void gate(nb::handle x, nb::handle out, const std::string& activation) {
  const View in = view(x, "x", Type::kFloat32, 2), y = view(out, "out", Type::kFloat32, 2);
  expect_size(y, "out", 0, in.shape[0]);
  expect_size(in, "x", 1, 2 * y.shape[1]);
  const Activation chosen = activation_of(activation);
  RowsJob job{};
  job.x = in.as<float>();
  job.x_stride = in.stride[0];
  job.columns = y.shape[1];
  job.y = y.as<float>();
  job.y_stride = y.stride[0];
  const nb::gil_scoped_release release;
  over_rows(in.shape[0], in.shape[1], [&](int64_t low, int64_t high) { kernels().gate(job, chosen, low, high); });
}

void rope(nb::handle x, nb::handle cosine, nb::handle sine) {
  const View in = view(x, "x", Type::kFloat32, 3, 2);
  const AngleArgument angles = angle_argument(cosine, sine, in.shape[0], in.shape[2]);
  const RopeJob job{in.as<float>(),
                    in.stride[0],
                    in.shape[1],
                    in.shape[2],
                    angles.cosine.as<float>(),
                    angles.sine.as<float>(),
                    angles.cosine.stride[0],
                    angles.cosine.shape[1]};
  const nb::gil_scoped_release release;
  over_rows(in.shape[0], in.shape[1] * in.shape[2], [&](int64_t low, int64_t high) { kernels().rope(job, low, high); });
}

void argmax(nb::handle x, nb::handle out) {
  const View in = view(x, "x", Type::kFloat32, 2), y = view(out, "out", Type::kInt64, 1);
  expect_size(y, "out", 0, in.shape[0]);
  if (in.shape[0] && in.shape[1] < 1) throw nb::value_error("x has no columns");
  const nb::gil_scoped_release release;
  over_rows(in.shape[0], in.shape[1], [&](int64_t low, int64_t high) {
    for (int64_t row = low; row < high; ++row) {
      y.as<int64_t>()[row * y.stride[0]] = kernels().argmax(in.as<float>() + row * in.stride[0], in.shape[1]);
    }
  });
}

void set_threads(int threads, int spin_us, const std::vector<int>& cores) {
  PoolSettings settings;
  settings.threads = threads;
  settings.spin_us = spin_us;
  settings.cores = cores;
  const nb::gil_scoped_release release;
  configure_pool(settings);
}

nb::dict threads() {
  const PoolSettings settings = pool_settings();
  nb::dict out;
  out["threads"] = settings.threads;
  out["spin_us"] = settings.spin_us;
  out["cores"] = settings.cores;
  return out;
}

}  // namespace
}  // namespace paceline

NB_MODULE(_core, m) {
  using namespace paceline;
  if (supported_isas().empty()) {
    throw nb::import_error(
        "paceline_native needs a processor with AVX2, FMA and F16C; this one lacks them, so Paceline runs on torch");
  }
  // An engine takes its modules out of the garbage collector's sight, so that they are still there when it exits.
  nb::set_leak_warnings(PACELINE_SANITIZED);
  m.attr("SANITIZED") = bool(PACELINE_SANITIZED);
  m.def("isas", &supported_isas);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("use_isa", &use_isa, "name"_a);
  m.def("available_cores", &available_cores);
  m.def("set_threads", &set_threads, "threads"_a, "spin_us"_a = 50, "cores"_a = std::vector<int>());
  m.def("threads", &threads);

  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__call__", &apply, "x"_a, "out"_a, "activation"_a = "none", "residual"_a = nb::none())
      .def("unpack", &unpack, "out"_a)
      .def("rows", &rows, "ids"_a, "out"_a)
      .def("buffer", &buffer)
      .def_prop_ro("description", &describe)
      .def_prop_ro("nbytes", &PackedLinear::bytes)
      .def_prop_ro("in_features", [](const PackedLinear& map) { return map.shape().in_features; })
      .def_prop_ro("out_features", [](const PackedLinear& map) { return map.shape().outputs; });
  m.def("pack", &pack, "weight"_a, "kind"_a, "bias"_a = nb::none(), "gated"_a = false, "group"_a = nb::none(),
        "minimum"_a = false);
  m.def("pack_int8", &pack_int8, "weight"_a, "scale"_a, "group"_a = 64, "bias"_a = nb::none(), "gated"_a = false);
  m.def("pack_int4", &pack_int4, "weight"_a, "scale"_a, "minimum"_a = nb::none(), "group"_a = 32, "bias"_a = nb::none(),
        "gated"_a = false);
  m.def("restore", &restore, "description"_a, "data"_a);

  m.def("paged_attention", &attention, "q"_a, "k"_a, "v"_a, "keys"_a, "values"_a, "slots"_a, "tables"_a, "row_starts"_a,
        "context_lens"_a, "out"_a, "scale"_a, "window"_a = kNoWindow, "softcap"_a = 0.0, "sinks"_a = nb::none(),
        "key_scales"_a = nb::none(), "value_scales"_a = nb::none());
  bind_layers(m);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a, "residual"_a = nb::none());
  m.def("gate", &gate, "x"_a, "out"_a, "activation"_a = "silu");
  m.def("rope", &rope, "x"_a, "cos"_a, "sin"_a);
  m.def("argmax", &argmax, "x"_a, "out"_a);
  bind_sampling(m);
}
