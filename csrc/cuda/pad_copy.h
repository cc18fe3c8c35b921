// Launching pad-copy on a CUDA stream. Knows no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/boxes.h"

namespace pyparallel::cuda {

// Up to this many boxes travel in the launch's own parameters.
constexpr int64_t kMaxParameterBoxes = 64;

// Queues the copy on `stream`, on the current device. table.boxes is host memory when
// num_boxes <= kMaxParameterBoxes, and is read before this returns; else it is device
// memory that stays valid until the copy has run. `word` is common_word of the table as
// it was on the host. Returns the launch's error.
cudaError_t pad_copy(BoxTable table, int word, cudaStream_t stream);

}  // namespace pyparallel::cuda
