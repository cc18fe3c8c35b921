// Torch glue of packing on CUDA, for the one registration in backend_cuda.cpp.
#pragma once

#include "ops/backend.h"

namespace pyparallel::cuda {

// Queues the packing on the current stream of `device`.
void pack_glue(const Pack& body, c10::Device device);

}  // namespace pyparallel::cuda
