// Launching an image batch on a CUDA stream. Knows no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/image/job.h"

namespace pyparallel::cuda {

// Queues the batch on `stream`, on the current device: one launch for up to 1,000
// images where the device takes so many parameters, else and beyond that several. The
// table of images is host memory and is read before this returns; what it points to is
// the device's. Returns the error of the first launch that failed.
cudaError_t image_batch(const ImageJob& job, cudaStream_t stream);

}  // namespace pyparallel::cuda
