// The CUDA runtime API: memory and copies.
#include <cuda_runtime_api.h>

#include <string>

#include "allocations.h"
#include "calls.h"
#include "capture.h"
#include "copies.h"
#include "streams.h"

using fakecuda::fail;
using fakecuda::Kind;

namespace {

constexpr unsigned kUnsafeMemoryCall = fakecuda::kOpensContext | fakecuda::kUnsafe;

cudaError_t allocate(void** pointer, Kind kind, size_t nbytes, unsigned flags) {
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  *pointer = fakecuda::allocate(kind, nbytes, fakecuda::current_device(), flags);
  return *pointer != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

// The batch must say for each copy in which order its source is read.
bool are_valid(const cudaMemcpyAttributes* attributes, const size_t* first_copies,
               size_t num_attributes, size_t num_copies) {
  if (num_attributes == 0 || num_attributes > num_copies || first_copies[0] != 0) {
    return false;
  }
  for (size_t i = 0; i < num_attributes; ++i) {
    if (attributes[i].srcAccessOrder == cudaMemcpySrcAccessOrderInvalid) return false;
    if (first_copies[i] >= num_copies) return false;
    if (i > 0 && first_copies[i] <= first_copies[i - 1]) return false;
  }
  return true;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  FAKECUDA_BEGIN("cudaMalloc", kUnsafeMemoryCall);
  return allocate(pointer, Kind::kDevice, nbytes, 0);
}

cudaError_t cudaFree(void* pointer) {
  FAKECUDA_BEGIN("cudaFree", kUnsafeMemoryCall);
  if (pointer == nullptr) return cudaSuccess;
  const auto allocation =
      fakecuda::find_allocation(reinterpret_cast<uintptr_t>(pointer));
  if (allocation) fakecuda::synchronize(allocation->device);  // as CUDA does
  return fail(fakecuda::free_allocation(Kind::kDevice, pointer));
}

cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned flags) {
  FAKECUDA_BEGIN("cudaHostAlloc", kUnsafeMemoryCall);
  return allocate(pointer, Kind::kPinned, nbytes, flags);
}

cudaError_t cudaMallocHost(void** pointer, size_t nbytes) {
  FAKECUDA_BEGIN("cudaMallocHost", kUnsafeMemoryCall);
  return allocate(pointer, Kind::kPinned, nbytes, 0);
}

cudaError_t cudaFreeHost(void* pointer) {
  FAKECUDA_BEGIN("cudaFreeHost", kUnsafeMemoryCall);
  if (pointer == nullptr) return cudaSuccess;
  return fail(fakecuda::free_allocation(Kind::kPinned, pointer));
}

cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned flags) {
  FAKECUDA_BEGIN("cudaHostRegister", kUnsafeMemoryCall);
  return fail(
      fakecuda::register_host(pointer, nbytes, fakecuda::current_device(), flags));
}

cudaError_t cudaHostUnregister(void* pointer) {
  FAKECUDA_BEGIN("cudaHostUnregister", kUnsafeMemoryCall);
  return fail(fakecuda::unregister_host(pointer));
}

cudaError_t cudaMemGetInfo(size_t* num_free, size_t* num_total) {
  FAKECUDA_BEGIN("cudaMemGetInfo", fakecuda::kOpensContext);
  *num_total = fakecuda::device_capacity();
  *num_free = *num_total - fakecuda::device_nbytes(fakecuda::current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* pointer) {
  FAKECUDA_BEGIN("cudaPointerGetAttributes", fakecuda::kOpensContext);
  *attributes = {};
  const auto found = fakecuda::find_allocation(reinterpret_cast<uintptr_t>(pointer));
  if (!found) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;  // cudaInvalidDeviceId
    attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  attributes->type = found->is_host() ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = found->device;
  attributes->devicePointer = const_cast<void*>(pointer);
  if (found->is_host()) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaMemcpyAsync", fakecuda::kOpensContext);
  return fail(fakecuda::copy(to, from, nbytes, stream, "cudaMemcpyAsync"));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  FAKECUDA_BEGIN("cudaMemcpy", kUnsafeMemoryCall);
  return fail(fakecuda::copy_and_wait(to, from, nbytes));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes,
                                cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaMemcpyPeerAsync", fakecuda::kOpensContext);
  return fail(fakecuda::copy(to, from, nbytes, stream, "cudaMemcpyPeerAsync"));
}

cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from,
                                 const size_t* nbytes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first_copies,
                                 size_t num_attributes, cudaStream_t stream) {
  const char* const name = "cudaMemcpyBatchAsync";
  FAKECUDA_BEGIN(name, fakecuda::kOpensContext);
  if (stream == nullptr || stream == cudaStreamLegacy || count == 0 ||
      !are_valid(attributes, first_copies, num_attributes, count)) {
    fakecuda::add_problem("cudaMemcpyBatchAsync with invalid arguments");
    return fail(cudaErrorInvalidValue);
  }
  fakecuda::Stream* const queue = fakecuda::find_stream(stream, name);
  if (queue == nullptr) return fail(cudaErrorInvalidResourceHandle);
  const cudaError_t captured = fakecuda::reject_capture(queue, name, "under capture");
  if (captured != cudaSuccess) return fail(captured);
  // No order is promised within a batch; callers may not rely on the usual one.
  for (size_t i = count; i-- > 0;) {
    if (nbytes[i] == 0 || to[i] == nullptr || from[i] == nullptr) {
      fakecuda::add_problem("cudaMemcpyBatchAsync with an empty copy");
      return fail(cudaErrorInvalidValue);
    }
    const cudaError_t error = fakecuda::copy(to[i], from[i], nbytes[i], stream, name);
    if (error != cudaSuccess) return fail(error);
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaMemsetAsync", fakecuda::kOpensContext);
  return fail(fakecuda::fill(to, value, nbytes, stream, "cudaMemsetAsync"));
}

cudaError_t cudaMemset(void* to, int value, size_t nbytes) {
  FAKECUDA_BEGIN("cudaMemset", kUnsafeMemoryCall);
  return fail(fakecuda::fill(to, value, nbytes, cudaStreamLegacy, "cudaMemset"));
}

}  // extern "C"
