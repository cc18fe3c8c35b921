// Launching pad-copy on a CUDA stream. Knows no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/boxes.h"

namespace pyparallel::cuda {

// Boxes and starts of at most so many bytes travel in the launch's own parameters, of
// which a device takes 4 KiB: 83 boxes, or 55 with starts.
constexpr int64_t kParameterBytes = 3984;

inline int64_t box_nbytes(const BoxTable& table) {
  return table.num_boxes * static_cast<int64_t>(sizeof(Box));
}

inline int64_t start_nbytes(const BoxTable& table) {
  if (table.starts == nullptr) return 0;
  return table.num_boxes * static_cast<int64_t>(sizeof(Start));
}

inline bool fits_parameters(const BoxTable& table) {
  return box_nbytes(table) + start_nbytes(table) <= kParameterBytes;
}

enum class Writes { kBytes, kMarks };

// Queues the copy on `stream`, on the current device; with kMarks, of ones instead of
// bytes. Boxes and starts are host memory where fits_parameters(table), and are read
// before this returns; else they are device memory that stays valid until the copy has
// run. `word` is common_word of the table as it was on the host. Returns the launch's
// error.
cudaError_t pad_copy(BoxTable table, int word, Writes writes, cudaStream_t stream);

}  // namespace pyparallel::cuda
