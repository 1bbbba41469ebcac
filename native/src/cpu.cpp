#include "cpu.h"

#include <cpuid.h>

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

bool has_avx2_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
}

struct Choice {
  const Kernels& (*kernels)();
  bool (*supported)();
};

// The best last.
constexpr Choice kChoices[] = {
    {kernels_avx2, has_avx2}, {kernels_avx2_vnni, has_avx2_vnni}, {kernels_avx512, has_avx512}};

const Kernels* best() {
  const Kernels* found = nullptr;
  for (const Choice& choice : kChoices) {
    if (choice.supported()) found = &choice.kernels();
  }
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Choice& choice : kChoices) {
    if (choice.supported()) names.emplace_back(choice.kernels().name);
  }
  return names;
}

const Kernels& kernels() { return *chosen().load(std::memory_order_acquire); }

void use_isa(const std::string& name) {
  std::string known;
  for (const Choice& choice : kChoices) {
    if (!choice.supported()) continue;
    const Kernels& kernels = choice.kernels();
    if (name == kernels.name) return chosen().store(&kernels, std::memory_order_release);
    known += (known.empty() ? "" : ", ") + std::string(kernels.name);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not one that this processor has: " + known);
}

}  // namespace paceline
