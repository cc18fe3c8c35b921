// Launches a packing on a CUDA stream. Uses no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/pack.h"

namespace pyparallel::cuda {

// Queues the packing on `stream`, on the current device, in as few launches as its
// slots need. Sets body.piece. The slots are host memory, read before this returns;
// slab and leaves are device memory. Returns the first error.
cudaError_t pack(const Pack& body, cudaStream_t stream);

}  // namespace pyparallel::cuda
