#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds flatten, copy_compact and the operators on leaves of _C.pyi.
void define_leaves(pybind11::module_* module);

}  // namespace pyparallel::bindings
