#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

// Adds DecoderLayer and run_layers to the module.
void bind_layers(nanobind::module_& m);

}  // namespace paceline
