#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds RecordedEvent, Fence, Runtime, send, transfers, pinned_info and bound_pinned.
void define_transfer(pybind11::module_* module);

}  // namespace pyparallel::bindings
