// The CUDA runtime API: registration and launch of kernels, for nvcc's generated code.
#include <cuda_runtime_api.h>

#include <vector>

#include "calls.h"
#include "kernels.h"

using fakecuda::fail;
using fakecuda::Launch;

namespace {

constexpr int kMaxBlockThreads = 1024;
constexpr int kRegisters = 32;
constexpr int kCapability = 90;
constexpr int kBlocksPerMultiprocessor = 8;

// Of the `<<<...>>>` expressions that the thread has begun.
thread_local std::vector<Launch> configurations;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

char __cudaInitModule(void**) { return 1; }

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name,
                            int, uint3*, uint3*, dim3*, dim3*, int*) {
  fakecuda::register_kernel(host_function, name);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
  const Launch launch = configurations.back();
  configurations.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared_bytes = launch.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                               void** arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaLaunchKernel", fakecuda::kOpensContext);
  const Launch launch{grid, block, shared_bytes, stream};
  return fail(fakecuda::launch_kernel(kernel, launch, arguments));
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block,
                             void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaLaunchKernel", fakecuda::kOpensContext);
  const Launch launch{grid, block, shared_bytes, stream};
  return fail(fakecuda::launch_kernel(kernel, launch, arguments));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  FAKECUDA_BEGIN("cudaLaunchKernel", fakecuda::kOpensContext);
  const Launch launch{config->gridDim, config->blockDim, config->dynamicSmemBytes,
                      config->stream};
  return fail(fakecuda::launch_kernel(kernel, launch, arguments));
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  FAKECUDA_BEGIN("cudaFuncGetAttributes", fakecuda::kOpensContext);
  *attributes = {};
  attributes->maxThreadsPerBlock = kMaxBlockThreads;
  attributes->numRegs = kRegisters;
  attributes->binaryVersion = kCapability;
  attributes->ptxVersion = kCapability;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  FAKECUDA_BEGIN("cudaFuncSetAttribute", fakecuda::kOpensContext);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num, const void*, int,
                                                          size_t) {
  *num = kBlocksPerMultiprocessor;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num,
                                                                   const void*, int,
                                                                   size_t, unsigned) {
  *num = kBlocksPerMultiprocessor;
  return cudaSuccess;
}

}  // extern "C"
