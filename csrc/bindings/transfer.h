#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds send, Sent and transfers.
void define_transfer(pybind11::module_* module);

}  // namespace pyparallel::bindings
