// The driver API as far as torch needs it, and the functions of both APIs that the fake
// lacks: each returns an error, with a problem for the test.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

#include "calls.h"

namespace {

int refuse(const char* name) {
  fakecuda::add_problem(std::string(name) + " is missing in the fake runtime");
  return cudaErrorNotSupported;  // CUDA_ERROR_NOT_SUPPORTED has the same number
}

}  // namespace

extern "C" {

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = fakecuda::has_context(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  static int any;
  *context = reinterpret_cast<CUcontext>(&any);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (result != nullptr) {
    *result = *function != nullptr ? cudaDriverEntryPointSuccess
                                   : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"

// The linker takes any type for a name, and no caller looks at more than the error.
#define FAKECUDA_MISSING(name)                    \
  extern "C" int missing_##name() __asm__(#name); \
  extern "C" __attribute__((used)) int missing_##name() { return refuse(#name); }

FAKECUDA_MISSING(cudaDeviceGetDefaultMemPool)
FAKECUDA_MISSING(cudaFreeAsync)
FAKECUDA_MISSING(cudaGetSymbolAddress)
FAKECUDA_MISSING(cudaGraphDebugDotPrint)
FAKECUDA_MISSING(cudaGraphNodeGetDependencies)
FAKECUDA_MISSING(cudaIpcCloseMemHandle)
FAKECUDA_MISSING(cudaIpcGetEventHandle)
FAKECUDA_MISSING(cudaIpcGetMemHandle)
FAKECUDA_MISSING(cudaIpcOpenEventHandle)
FAKECUDA_MISSING(cudaIpcOpenMemHandle)
FAKECUDA_MISSING(cudaLaunchCooperativeKernel)
FAKECUDA_MISSING(cudaMallocAsync)
FAKECUDA_MISSING(cudaMemPoolGetAttribute)
FAKECUDA_MISSING(cudaMemPoolSetAccess)
FAKECUDA_MISSING(cudaMemPoolSetAttribute)
FAKECUDA_MISSING(cudaMemPoolTrimTo)
FAKECUDA_MISSING(cudaMemcpy2DAsync)
FAKECUDA_MISSING(cudaMemcpyToSymbol)
FAKECUDA_MISSING(cuCtxFromGreenCtx)
FAKECUDA_MISSING(cuCtxPopCurrent)
FAKECUDA_MISSING(cuCtxPushCurrent)
FAKECUDA_MISSING(cuCtxSetCurrent)
FAKECUDA_MISSING(cuDevResourceGenerateDesc)
FAKECUDA_MISSING(cuDevSmResourceSplitByCount)
FAKECUDA_MISSING(cuDeviceGet)
FAKECUDA_MISSING(cuDeviceGetAttribute)
FAKECUDA_MISSING(cuDeviceGetDevResource)
FAKECUDA_MISSING(cuDevicePrimaryCtxRetain)
FAKECUDA_MISSING(cuFuncGetAttribute)
FAKECUDA_MISSING(cuFuncSetAttribute)
FAKECUDA_MISSING(cuFuncSetCacheConfig)
FAKECUDA_MISSING(cuGreenCtxCreate)
FAKECUDA_MISSING(cuGreenCtxDestroy)
FAKECUDA_MISSING(cuGreenCtxStreamCreate)
FAKECUDA_MISSING(cuLaunchCooperativeKernel)
FAKECUDA_MISSING(cuLaunchKernel)
FAKECUDA_MISSING(cuLinkAddData_v2)
FAKECUDA_MISSING(cuLinkComplete)
FAKECUDA_MISSING(cuLinkCreate_v2)
FAKECUDA_MISSING(cuMemAddressFree)
FAKECUDA_MISSING(cuMemAddressReserve)
FAKECUDA_MISSING(cuMemCreate)
FAKECUDA_MISSING(cuMemExportToShareableHandle)
FAKECUDA_MISSING(cuMemGetAllocationGranularity)
FAKECUDA_MISSING(cuMemGetAllocationPropertiesFromHandle)
FAKECUDA_MISSING(cuMemImportFromShareableHandle)
FAKECUDA_MISSING(cuMemMap)
FAKECUDA_MISSING(cuMemRelease)
FAKECUDA_MISSING(cuMemRetainAllocationHandle)
FAKECUDA_MISSING(cuMemSetAccess)
FAKECUDA_MISSING(cuMemUnmap)
FAKECUDA_MISSING(cuMemsetD32Async)
FAKECUDA_MISSING(cuModuleGetFunction)
FAKECUDA_MISSING(cuModuleLoad)
FAKECUDA_MISSING(cuModuleLoadData)
FAKECUDA_MISSING(cuModuleLoadDataEx)
FAKECUDA_MISSING(cuModuleUnload)
FAKECUDA_MISSING(cuMulticastAddDevice)
FAKECUDA_MISSING(cuMulticastBindMem)
FAKECUDA_MISSING(cuMulticastCreate)
FAKECUDA_MISSING(cuMulticastUnbind)
FAKECUDA_MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
FAKECUDA_MISSING(cuPointerGetAttribute)
FAKECUDA_MISSING(cuStreamWriteValue32)
FAKECUDA_MISSING(cuTensorMapEncodeTiled)
