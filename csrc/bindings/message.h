#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds encode and decode.
void define_message(pybind11::module_* module);

}  // namespace pyparallel::bindings
