// Kernels and their launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fakecuda {

// Called by nvcc's start-up code for each kernel of a library.
void register_kernel(const void* host_function, const char* mangled_name);

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// Runs a kernel whose PTX is in a file of FAKECUDA_PTX. Stores the name of any other:
// it does nothing.
cudaError_t launch_kernel(const void* host_function, const Launch& launch,
                          void** arguments);

// The demangled names of launched kernels without PTX.
std::vector<std::string> take_unknown_kernels();

// A kernel that runs as a function of the host, in stream order.
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

uint64_t num_interpreted_kernels();

}  // namespace fakecuda
