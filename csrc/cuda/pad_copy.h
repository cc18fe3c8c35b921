// Launching pad-copy on a CUDA stream. Knows no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/boxes.h"

namespace pyparallel::cuda {

enum class Writes { kBytes, kMask };

// Queues the copy on `stream`, on the current device; with kMask, of ones instead of
// bytes. Boxes and starts travel in the parameters of one launch, or of several where
// there are too many; they are host memory and are read before this returns. Returns
// the error of the first launch that failed.
cudaError_t pad_copy(const BoxTable& table, Writes writes, cudaStream_t stream);

}  // namespace pyparallel::cuda
