#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds image_batch.
void define_image(pybind11::module_* module);

}  // namespace pyparallel::bindings
