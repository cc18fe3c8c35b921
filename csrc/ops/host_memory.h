#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pyparallel::ops {

// An uninitialised contiguous CPU tensor, in recycled memory if it is large. Where
// torch is asked to fill new memory with junk (deterministic algorithms), it is
// torch's.
at::Tensor new_host_tensor(c10::IntArrayRef shape, c10::ScalarType dtype);

}  // namespace pyparallel::ops
