#pragma once

#include <ATen/core/Tensor.h>

#include "ops/snapshot.h"

namespace pyparallel::ops {

// Whether these are CPU tensors of one shape and dtype, contiguous and plain, whose
// elements lie within their storage, and of which autograd wants nothing. At least one.
bool are_equal(TensorRefs samples);

// An uninitialised tensor (samples.size(), *shape) like the first of them.
at::Tensor new_stack(TensorRefs samples);

// Copies equal samples into `dst`, made by new_stack, one after the other. Keep the
// GIL: nothing is held, as nothing can change meanwhile.
void copy_equal(const at::Tensor& dst, TensorRefs samples);

}  // namespace pyparallel::ops
