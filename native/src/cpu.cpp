#include "cpu.h"

#include <atomic>
#include <stdexcept>

namespace paceline {
namespace {

// GCC's and Clang's own check, which asks the operating system too whether it saves the wide registers.
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

const Kernels* best() { return has_avx512() ? &kernels_avx512() : &kernels_avx2(); }

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  if (has_avx2()) names.emplace_back(kernels_avx2().name);
  if (has_avx512()) names.emplace_back(kernels_avx512().name);
  return names;
}

const Kernels& kernels() { return *chosen().load(std::memory_order_acquire); }

void use_isa(const std::string& name) {
  if (name == kernels_avx2().name && has_avx2()) {
    chosen().store(&kernels_avx2(), std::memory_order_release);
  } else if (name == kernels_avx512().name && has_avx512()) {
    chosen().store(&kernels_avx512(), std::memory_order_release);
  } else {
    std::string known;
    for (const std::string& isa : supported_isas()) known += (known.empty() ? "" : ", ") + isa;
    throw std::invalid_argument("instruction set '" + name + "' is not one that this processor has: " + known);
  }
}

}  // namespace paceline
