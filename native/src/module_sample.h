#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

// Adds `sample` to the module.
void bind_sampling(nanobind::module_& m);

}  // namespace paceline
