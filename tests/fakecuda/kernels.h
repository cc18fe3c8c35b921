// Kernels: which host function launches which, and their launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
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

uint64_t num_interpreted_kernels();
uint64_t num_instructions();

}  // namespace fakecuda
