// Which kernels this processor can run.
#pragma once

#include <string>
#include <vector>

#include "jobs.h"

namespace paceline {

// Names of the instruction sets that this processor and its operating system support, the best last. Empty where even
// AVX2, FMA or F16C is missing.
std::vector<std::string> supported_isas();

// The kernels in use: the best supported, unless `use_isa` chose others.
const Kernels& kernels();

// Raises std::invalid_argument for a name that is not supported here.
void use_isa(const std::string& name);

}  // namespace paceline
