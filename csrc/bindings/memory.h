#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds empty, cache_info, bound_cache and clear_cache.
void define_memory(pybind11::module_* module);

}  // namespace pyparallel::bindings
