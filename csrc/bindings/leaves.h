#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds flatten, select_tensors, replace_tensors, find_unpackable and are_compact.
void define_leaves(pybind11::module_* module);

}  // namespace pyparallel::bindings
