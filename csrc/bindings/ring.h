#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyparallel::bindings {

// Adds ring_format, ring_claim, ring_pass, ring_reclaim and ring_holders.
void define_ring(pybind11::module_* module);

}  // namespace pyparallel::bindings
