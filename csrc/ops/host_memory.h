#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pyparallel::ops {

// Returns an uninitialised contiguous CPU tensor, in recycled memory if it is large.
// With deterministic algorithms torch allocates it, because torch then fills new
// memory.
at::Tensor new_host_tensor(c10::IntArrayRef shape, c10::ScalarType dtype);

}  // namespace pyparallel::ops
