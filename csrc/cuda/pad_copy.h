// Launches a pad-copy on a CUDA stream. Uses no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/boxes.h"

namespace pyparallel::cuda {

enum class Writes { kBytes, kMask };

// Queues the copy on `stream`, on the current device. With kMask it writes ones in
// place of the source bytes. Boxes and starts are parameters of one launch, or of
// several if there are too many. They are host memory, read before this returns.
// Returns the error of the first launch that failed.
cudaError_t pad_copy(const BoxTable& table, Writes writes, cudaStream_t stream);

}  // namespace pyparallel::cuda
