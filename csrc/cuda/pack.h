// Launching pack on a CUDA stream. Knows no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/pack.h"

namespace pyparallel::cuda {

// Queues the packing on `stream`, on the current device, in as few launches as its
// slots need; chooses body.piece itself. The slots are host memory and read before this
// returns; the slab and the leaves are the device's. Returns the first error.
cudaError_t pack(const Pack& body, cudaStream_t stream);

}  // namespace pyparallel::cuda
