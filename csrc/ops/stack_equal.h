#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ops/snapshot.h"

namespace pyparallel::ops {

// Returns the first bytes of these samples if they are plain contiguous CPU tensors of
// one shape and dtype, with all elements within their storage and without gradients to
// record; else nothing. Needs at least one.
std::vector<const uint8_t*> equal_sources(TensorRefs samples);

// Returns an uninitialised tensor (samples.size(), *shape) with the dtype of the first.
at::Tensor new_stack(TensorRefs samples);

// Copies equal samples to `dst`, made by new_stack, one after the other. Keep the GIL:
// without it the samples could change, because no snapshot protects them.
void copy_equal(const at::Tensor& dst, const std::vector<const uint8_t*>& sources);

}  // namespace pyparallel::ops
