// The CUDA runtime API: devices, errors, versions.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "allocations.h"
#include "calls.h"
#include "capture.h"
#include "streams.h"

using fakecuda::fail;

namespace {

// The compute capability of an H200, and few multiprocessors: small grids.
constexpr int kMajor = 9;
constexpr int kMinor = 0;
constexpr int kMultiprocessors = 4;
constexpr int kWarpSize = 32;
constexpr int kMaxBlockThreads = 1024;
constexpr int kMaxThreads = 2048;
constexpr int kMaxGridX = 0x7FFFFFFF;
constexpr int kMaxGridYZ = 65535;
constexpr int kMaxBlockZ = 64;
constexpr int kSharedBytes = 48 * 1024;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kRegisters = 65536;
constexpr int kCacheBytes = 60 << 20;
constexpr int kHighestPriority = -5;

bool is_device(int device) { return device >= 0 && device < fakecuda::num_devices(); }

// NVIDIA's library knows the texts without a driver.
const char* text_of(const char* function, cudaError_t error) {
  using Texts = const char* (*)(cudaError_t);
  static Texts const names =
      reinterpret_cast<Texts>(dlsym(RTLD_NEXT, "cudaGetErrorName"));
  static Texts const strings =
      reinterpret_cast<Texts>(dlsym(RTLD_NEXT, "cudaGetErrorString"));
  Texts const texts = strcmp(function, "cudaGetErrorName") == 0 ? names : strings;
  if (texts != nullptr) return texts(error);
  thread_local char number[32];
  snprintf(number, sizeof number, "error %d", static_cast<int>(error));
  return number;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  FAKECUDA_BEGIN("cudaGetDeviceCount", fakecuda::kPlain);
  *count = fakecuda::num_devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  FAKECUDA_BEGIN("cudaGetDevice", fakecuda::kPlain);
  *device = fakecuda::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  FAKECUDA_BEGIN("cudaSetDevice", fakecuda::kPlain);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  fakecuda::set_current_device(device);
  fakecuda::open_context(device);  // since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  FAKECUDA_BEGIN("cudaGetDeviceProperties", fakecuda::kPlain);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  cudaDeviceProp p{};
  snprintf(p.name, sizeof p.name, "Fake GPU");
  p.uuid.bytes[0] = static_cast<char>(device + 1);
  p.totalGlobalMem = fakecuda::kDeviceNbytes;
  p.sharedMemPerBlock = kSharedBytes;
  p.sharedMemPerBlockOptin = kMaxSharedBytes;
  p.sharedMemPerMultiprocessor = kMaxSharedBytes;
  p.regsPerBlock = kRegisters;
  p.regsPerMultiprocessor = kRegisters;
  p.warpSize = kWarpSize;
  p.maxThreadsPerBlock = kMaxBlockThreads;
  p.maxThreadsPerMultiProcessor = kMaxThreads;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = kMaxBlockThreads;
  p.maxThreadsDim[2] = kMaxBlockZ;
  p.maxGridSize[0] = kMaxGridX;
  p.maxGridSize[1] = p.maxGridSize[2] = kMaxGridYZ;
  p.major = kMajor;
  p.minor = kMinor;
  p.multiProcessorCount = kMultiprocessors;
  p.l2CacheSize = kCacheBytes;
  p.pciBusID = device + 1;
  p.unifiedAddressing = p.concurrentKernels = p.asyncEngineCount = 1;
  p.canMapHostMemory = p.hostRegisterSupported = 1;
  *properties = p;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  FAKECUDA_BEGIN("cudaDeviceGetAttribute", fakecuda::kPlain);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  static const std::map<cudaDeviceAttr, int> values{
      {cudaDevAttrComputeCapabilityMajor, kMajor},
      {cudaDevAttrComputeCapabilityMinor, kMinor},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrMaxThreadsPerBlock, kMaxBlockThreads},
      {cudaDevAttrMaxThreadsPerMultiProcessor, kMaxThreads},
      {cudaDevAttrWarpSize, kWarpSize},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedBytes},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kMaxSharedBytes},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kMaxSharedBytes},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrAsyncEngineCount, 1}};
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;  // a feature that it lacks
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  FAKECUDA_BEGIN("cudaDeviceCanAccessPeer", fakecuda::kPlain);
  *can_access = 0;
  return is_device(device) && is_device(peer) ? cudaSuccess
                                              : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  FAKECUDA_BEGIN("cudaDeviceEnablePeerAccess", fakecuda::kOpensContext);
  return fail(cudaErrorPeerAccessUnsupported);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  FAKECUDA_BEGIN("cudaDeviceGetStreamPriorityRange", fakecuda::kOpensContext);
  *lowest = 0;
  *highest = kHighestPriority;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int nbytes, int device) {
  FAKECUDA_BEGIN("cudaDeviceGetPCIBusId", fakecuda::kPlain);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  snprintf(text, static_cast<size_t>(nbytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  FAKECUDA_BEGIN("cudaDeviceSynchronize", fakecuda::kOpensContext | fakecuda::kUnsafe);
  fakecuda::synchronize(fakecuda::current_device());
  return fail(fakecuda::device_failure());
}

cudaError_t cudaGetLastError() {
  if (fakecuda::is_forked_child()) return cudaErrorInitializationError;
  return fakecuda::take_last_error();
}

cudaError_t cudaPeekAtLastError() { return fakecuda::last_error(); }

const char* cudaGetErrorName(cudaError_t error) {
  return text_of("cudaGetErrorName", error);
}

const char* cudaGetErrorString(cudaError_t error) {
  return text_of("cudaGetErrorString", error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  // As on a GPU, this call opens a context, but succeeds after the device has failed.
  FAKECUDA_BEGIN("cudaThreadExchangeStreamCaptureMode", fakecuda::kPlain);
  fakecuda::open_context(fakecuda::current_device());
  *mode = fakecuda::exchange_capture_mode(*mode);
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }

cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
