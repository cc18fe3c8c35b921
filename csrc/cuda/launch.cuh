// Launches kernels and defines the size of their parameters. No other file launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/boxes.h"
#include "core/work.h"

namespace pyparallel::cuda {

constexpr int kWarpSize = 32;
constexpr int kThreadsPerBlock = 256;
// Fills any GPU several times. Workers stride over the remaining rows.
constexpr int64_t kMaxBlocks = 16 * 1024;

// The tables of a body are parameters of its launch. So nothing is uploaded, no memory
// must live until the kernel runs, and a captured graph keeps its own copy. Every
// device takes 4 KiB; from CUDA 12.1 and compute capability 7.0 on, 32,764 bytes.
constexpr int64_t kFewBytes = 4096;

#if CUDART_VERSION >= 12010 && defined(__CUDA_ARCH_LIST__)
constexpr int64_t most_bytes() {
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  for (int arch : kArchs) {
    if (arch < 700) return kFewBytes;  // larger parameters do not compile for it
  }
  return 32764;
}
#else
constexpr int64_t most_bytes() { return kFewBytes; }
#endif

constexpr int64_t kManyBytes = most_bytes();

// Returns true if the driver and the current device take kManyBytes.
inline bool takes_many_bytes() {
  static const bool driver_does = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  int device = 0;
  int major = 0;
  return kManyBytes > kFewBytes && driver_does &&
         cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
             cudaSuccess &&
         major >= 7;
}

// One worker is `lanes` lanes of a warp, which share a row.
template <int min_blocks, int lanes, typename Body>
__global__ void __launch_bounds__(kThreadsPerBlock, min_blocks)
    run_body(const __grid_constant__ Body body, int64_t num_rows) {
  constexpr int kWorkers = kThreadsPerBlock / lanes;
  const int64_t worker =
      static_cast<int64_t>(blockIdx.x) * kWorkers + threadIdx.x / lanes;
  const int64_t num_workers = static_cast<int64_t>(gridDim.x) * kWorkers;
  body(Rows{worker, num_rows, num_workers},
       Lane{static_cast<int>(threadIdx.x % lanes), lanes});
}

// Queues `body` over num_rows rows on the current device. A multiprocessor must have
// room for `min_blocks` blocks, which limits the registers of each. `lanes` divides the
// size of a warp. Returns the error of the launch.
template <int min_blocks = 1, int lanes = kWarpSize, typename Body>
cudaError_t launch(const Body& body, int64_t num_rows, cudaStream_t stream) {
  static_assert(sizeof(Body) + sizeof(int64_t) <= kManyBytes);
  if (num_rows == 0) return cudaSuccess;
  constexpr int kWorkers = kThreadsPerBlock / lanes;
  const int64_t blocks = lesser((num_rows - 1) / kWorkers + 1, kMaxBlocks);
  run_body<min_blocks, lanes>
      <<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, stream>>>(body, num_rows);
  return cudaGetLastError();
}

}  // namespace pyparallel::cuda
