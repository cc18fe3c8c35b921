// Copies and fills in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fakecuda {

// Queues a copy with the behaviour of CUDA for the kinds of both ends: a pageable
// source is read before the return, a copy to pageable memory or within the host has
// ended.
cudaError_t copy(void* to, const void* from, size_t nbytes, cudaStream_t stream,
                 const char* name);
// The same, and the host waits as cudaMemcpy does.
cudaError_t copy_and_wait(void* to, const void* from, size_t nbytes);
cudaError_t fill(void* to, int value, size_t nbytes, cudaStream_t stream,
                 const char* name);

}  // namespace fakecuda
