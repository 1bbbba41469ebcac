// What Python sees of sampling.
#include "module_sample.h"

#include <cmath>
#include <string>

#include "sample.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

[[noreturn]] void refuse(const char* name, int64_t row, double value, const char* range) {
  const std::string message =
      std::string(name) + " of row " + std::to_string(row) + " is " + std::to_string(value) + "; it must be " + range;
  throw nb::value_error(message.c_str());
}

View parameter(nb::handle handle, const char* name, Type type, int64_t rows) {
  const View found = view(handle, name, type, 1);
  expect_size(found, name, 0, rows);
  return found;
}

void sample_rows(nb::handle logits, nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
                 nb::handle uniform, nb::handle tokens, nb::handle near) {
  const View x = view(logits, "logits", Type::kFloat32, 2);
  const int64_t rows = x.shape[0];
  if (rows && (x.shape[1] < 1 || x.shape[1] > INT32_MAX)) throw nb::value_error("logits must have 1 to 2**31 columns");
  const View t = parameter(temperature, "temperature", Type::kFloat64, rows);
  const View k = parameter(top_k, "top_k", Type::kInt64, rows), p = parameter(top_p, "top_p", Type::kFloat64, rows);
  const View m = parameter(min_p, "min_p", Type::kFloat64, rows);
  const View u = parameter(uniform, "uniform", Type::kFloat64, rows);
  const View out = parameter(tokens, "tokens", Type::kInt64, rows), flags = parameter(near, "near", Type::kUInt8, rows);
  for (int64_t row = 0; row < rows; ++row) {
    const double heat = t.as<double>()[row], drawn = u.as<double>()[row];
    if (!(heat >= 0.0 && std::isfinite(heat))) refuse("temperature", row, heat, "0 or more, and finite");
    if (!(drawn >= 0.0 && drawn < 1.0)) refuse("uniform", row, drawn, "in [0, 1)");
  }
  const SampleBatch batch{x.as<float>(),  x.stride[0],     rows,           x.shape[1],
                          t.as<double>(), k.as<int64_t>(), p.as<double>(), m.as<double>(),
                          u.as<double>(), out.as<int64_t>(), flags.as<uint8_t>()};
  const nb::gil_scoped_release release;
  sample(batch);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample_rows, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "tokens"_a,
        "near"_a);
}

}  // namespace paceline
