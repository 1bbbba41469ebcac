#include "tensor.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace paceline {
namespace {

// DLPack's structs, as its header lays them out (version 1.x), so that nothing but Python is needed to build this.
struct DLDevice {
  int32_t type;
  int32_t id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ExchangeApi {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};
constexpr int32_t kCpu = 1;

struct TypeName {
  Type type;
  uint8_t code, bits;
  const char* name;
};
constexpr TypeName kTypes[] = {
    {Type::kFloat32, 2, 32, "float32"}, {Type::kBFloat16, 4, 16, "bfloat16"}, {Type::kFloat16, 2, 16, "float16"},
    {Type::kInt8, 0, 8, "int8"},        {Type::kUInt8, 1, 8, "uint8"},        {Type::kInt64, 0, 64, "int64"},
    {Type::kFloat64, 2, 64, "float64"},
};

const TypeName& named(Type type) {
  for (const TypeName& known : kTypes) {
    if (known.type == type) return known;
  }
  throw std::logic_error("a type without a name");
}

// The library's table of C functions, kept with the type it was found on: a call through it takes a few nanoseconds
// where `__dlpack__` takes microseconds. Guarded by the GIL. Null where the type has none.
const ExchangeApi* exchange_api(nb::handle object) {
  static PyTypeObject* known_type = nullptr;
  static const ExchangeApi* known_api = nullptr;
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (type == known_type) return known_api;
  nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (capsule.is_none() || !PyCapsule_CheckExact(capsule.ptr())) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) {
    PyErr_Clear();
    return nullptr;
  }
  if (api->major != 1 || !api->tensor_from_object) return nullptr;
  Py_INCREF(type);  // so that its address is not given to another type
  known_type = type;
  known_api = api;
  return api;
}

[[noreturn]] void refuse(const char* name, std::initializer_list<Type> types, int ndim) {
  std::string wanted;
  for (const Type type : types) {
    if (!wanted.empty()) wanted += type == *(types.end() - 1) ? " or " : ", ";
    wanted += named(type).name;
  }
  const std::string message =
      std::string(name) + " must be a " + wanted + " tensor on the CPU with " + std::to_string(ndim) + " dimensions";
  throw nb::type_error(message.c_str());
}

// False where the object is no tensor; fills in all but `owner`.
bool describe(nb::handle object, View& out, DLDataType& dtype, DLDevice& device) {
  if (const ExchangeApi* api = exchange_api(object)) {
    DLTensor tensor;
    if (api->tensor_from_object(object.ptr(), &tensor) != 0) throw nb::python_error();
    out.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    out.ndim = tensor.ndim;
    dtype = tensor.dtype;
    device = tensor.device;
    int64_t dense = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
      if (i < 4) {
        out.shape[i] = tensor.shape[i];
        out.stride[i] = tensor.strides ? tensor.strides[i] : dense;
      }
      dense *= tensor.shape[i];
    }
    return true;
  }
  nb::ndarray<> array;
  if (!nb::try_cast(object, array)) return false;
  out.data = array.data();
  out.ndim = static_cast<int>(array.ndim());
  dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
  device = {array.device_type(), array.device_id()};
  for (int i = 0; i < out.ndim && i < 4; ++i) {
    out.shape[i] = static_cast<int64_t>(array.shape(i));
    out.stride[i] = array.stride(i);
  }
  out.owner = array;
  return true;
}

}  // namespace

View view(nb::handle handle, const char* name, Type type, int ndim, int dense) {
  return view(handle, name, {type}, ndim, dense);
}

View view(nb::handle handle, const char* name, std::initializer_list<Type> types, int ndim, int dense) {
  View out;
  DLDataType dtype{};
  DLDevice device{};
  if (!describe(handle, out, dtype, device)) refuse(name, types, ndim);
  const auto* const found = std::find_if(types.begin(), types.end(), [&](Type type) {
    return dtype.code == named(type).code && dtype.bits == named(type).bits && dtype.lanes == 1;
  });
  if (device.type != kCpu || found == types.end() || out.ndim != ndim) refuse(name, types, ndim);
  out.type = *found;
  int64_t elements = 1, expected = 1;
  for (int i = 0; i < ndim; ++i) elements *= out.shape[i];
  if (elements == 0) return out;  // strides of nothing mean nothing
  for (int i = ndim - 1; i >= ndim - dense; --i) {
    if (out.shape[i] != 1 && out.stride[i] != expected) {
      throw nb::value_error((std::string(name) + " must be contiguous in its last " +
                             (dense == 1 ? std::string("dimension") : std::to_string(dense) + " dimensions"))
                                .c_str());
    }
    expected *= out.shape[i];
  }
  return out;
}

View optional_view(nb::handle handle, const char* name, Type type, int ndim, int dense) {
  return handle.is_none() ? View() : view(handle, name, type, ndim, dense);
}

void expect_size(const View& view, const char* name, int axis, int64_t expected) {
  if (view.shape[axis] != expected) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(view.shape[axis]) + " along dimension " +
                           std::to_string(axis) + "; " + std::to_string(expected) + " was expected")
                              .c_str());
  }
}

}  // namespace paceline
