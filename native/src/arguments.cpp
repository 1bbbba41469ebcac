#include "arguments.h"

namespace nb = nanobind;

namespace paceline {

Activation activation_of(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "relu") return Activation::kRelu;
  throw nb::value_error(("activation '" + name + "' is not one of none, silu, gelu_tanh, relu").c_str());
}

namespace {

PoolKind pool_kind(Type type) {
  switch (type) {
    case Type::kBFloat16: return PoolKind::kBFloat16;
    case Type::kFloat16: return PoolKind::kFloat16;
    case Type::kInt8: return PoolKind::kInt8;
    default: return PoolKind::kFloat32;
  }
}

View scales_argument(nb::handle scales, const char* name, const View& scaled) {
  const View out = optional_view(scales, name, Type::kFloat32, 3, 3);
  if (scales.is_none() == (scaled.type == Type::kInt8)) {
    throw nb::value_error((std::string(name) + " is given with int8 keys and values, and with no others").c_str());
  }
  for (int axis = 0; !scales.is_none() && axis < 3; ++axis) expect_size(out, name, axis, scaled.shape[axis]);
  return out;
}

}  // namespace

PoolArgument pool_argument(nb::handle keys, nb::handle values, nb::handle key_scales, nb::handle value_scales) {
  PoolArgument out;
  View &k = out.keys, &v = out.values;
  k = view(keys, "keys", {Type::kFloat32, Type::kBFloat16, Type::kFloat16, Type::kInt8}, 4, 4);
  v = view(values, "values", k.type, 4, 4);
  for (int axis = 0; axis < 3; ++axis) expect_size(v, "values", axis, k.shape[axis]);
  out.key_scales = scales_argument(key_scales, "key_scales", k);
  out.value_scales = scales_argument(value_scales, "value_scales", v);
  out.pool = {pool_kind(k.type), k.data,     v.data,     out.key_scales.as<float>(), out.value_scales.as<float>(),
              k.shape[0],        k.shape[1], k.shape[2], k.shape[3],                 v.shape[3]};
  return out;
}

BatchArgument batch_argument(nb::handle slots, nb::handle tables, nb::handle row_starts, nb::handle context_lens,
                             int64_t tokens) {
  BatchArgument out{view(slots, "slots", Type::kInt64, 1),
                    view(tables, "tables", Type::kInt64, 2),
                    view(row_starts, "row_starts", Type::kInt64, 1),
                    view(context_lens, "context_lens", Type::kInt64, 1),
                    {}};
  const int64_t rows = out.context_lens.shape[0];
  expect_size(out.slots, "slots", 0, tokens);
  expect_size(out.row_starts, "row_starts", 0, rows + 1);
  expect_size(out.tables, "tables", 0, rows);
  out.batch.rows = {out.row_starts.as<int64_t>(), out.context_lens.as<int64_t>(), rows};
  out.batch.tokens = tokens;
  out.batch.slots = out.slots.as<int64_t>();
  out.batch.tables = out.tables.as<int64_t>();
  out.batch.table_stride = out.tables.stride[0];
  out.batch.table_blocks = out.tables.shape[1];
  return out;
}

AngleArgument angle_argument(nb::handle cosine, nb::handle sine, int64_t tokens, int64_t head_dim) {
  AngleArgument out{view(cosine, "cos", Type::kFloat32, 2), view(sine, "sin", Type::kFloat32, 2)};
  const View &c = out.cosine, &s = out.sine;
  for (int axis = 0; axis < 2; ++axis) expect_size(s, "sin", axis, c.shape[axis]);
  expect_size(c, "cos", 0, tokens);
  if (c.shape[1] % 2 || c.shape[1] > head_dim) {
    throw nb::value_error("cos must have an even number of features, at most those of a head");
  }
  if (tokens > 1 && c.stride[0] != s.stride[0]) throw nb::value_error("cos and sin must lie alike in memory");
  return out;
}

}  // namespace paceline
