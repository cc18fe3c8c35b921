// A kernel that runs as a function of the host, in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace fakecuda {

struct HostKernel {
  // Memory that the kernel reads or writes.
  struct Range {
    const void* begin;
    size_t nbytes;
  };

  std::string name;
  std::vector<Range> ranges;
  // May run several times: once for each launch of a graph. An exception
  // makes the device fail, like a failed assertion of a kernel.
  std::function<void()> body;
};

// Counts as a call of cudaLaunchKernel.
cudaError_t launch_host_kernel(cudaStream_t stream, HostKernel kernel);

// Loads libfakecuda_torch.so, if it is beside this library and torch is in the process.
void load_torch_operators();

}  // namespace fakecuda
