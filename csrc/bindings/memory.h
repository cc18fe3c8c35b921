#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds empty, cache_info, bound_cache, clear_cache, lock_generator and
// unlock_generator.
void define_memory(pybind11::module_* module);

}  // namespace pyparallel::bindings
