#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds the classes SlabPlan and Structure, which compare by value.
void define_values(pybind11::module_* module);

}  // namespace pyparallel::bindings
