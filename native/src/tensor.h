// Arguments: tensors of torch (or any library that speaks DLPack) and arrays of numpy, looked at and never copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace paceline {

enum class Type { kFloat32, kBFloat16, kFloat16, kInt8, kUInt8, kInt64, kFloat64 };

// A strided view of an argument. `owner` keeps what was borrowed for the time of a call.
struct View {
  void* data = nullptr;
  Type type = Type::kFloat32;
  int ndim = 0;
  int64_t shape[4] = {};
  int64_t stride[4] = {};  // in elements
  std::optional<nanobind::ndarray<>> owner;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// `handle` as a view. Raises TypeError where it is no CPU tensor of that type and rank, and ValueError where the last
// `dense` dimensions are not contiguous; both name the argument.
View view(nanobind::handle handle, const char* name, Type type, int ndim, int dense = 1);

// The same, of any of these types.
View view(nanobind::handle handle, const char* name, std::initializer_list<Type> types, int ndim, int dense = 1);

// The same, or an empty view for None.
View optional_view(nanobind::handle handle, const char* name, Type type, int ndim, int dense = 1);

// Raises ValueError unless dimension `axis` of the argument is `expected`.
void expect_size(const View& view, const char* name, int axis, int64_t expected);

}  // namespace paceline
