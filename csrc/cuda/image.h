// Launches an image batch on a CUDA stream. Uses no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/image/job.h"

namespace pyparallel::cuda {

// Queues the batch on `stream`, on the current device. One launch takes up to 1,000
// images, or 246 on devices with 4 KiB of parameters; more images take several
// launches. The table of images is host memory, read before this returns; the images
// are device memory. Returns the error of the first launch that failed.
cudaError_t image_batch(const ImageJob& job, cudaStream_t stream);

}  // namespace pyparallel::cuda
