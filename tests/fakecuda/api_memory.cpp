// The CUDA runtime API: memory and copies.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "allocations.h"
#include "calls.h"
#include "capture.h"
#include "streams.h"

namespace fakecuda {
namespace {

// One end of a copy: an allocation, or pageable memory.
struct Range {
  std::optional<Allocation> allocation;

  bool is_device() const { return allocation && !allocation->is_host(); }
  bool is_pageable() const { return !allocation; }
};

// Counts as a use of both allocations until it is destroyed.
class Use {
 public:
  explicit Use(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
    for (const Range& range : ranges_) {
      if (range.allocation) ++*range.allocation->uses;
    }
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    for (const Range& range : ranges_) {
      if (range.allocation) --*range.allocation->uses;
    }
  }

  // Adds a problem if an allocation is gone.
  bool is_alive(const char* name) const {
    for (const Range& range : ranges_) {
      if (range.allocation && !::fakecuda::is_alive(*range.allocation)) {
        add_problem(std::string(name) + " of memory that was freed before it ran");
        return false;
      }
    }
    return true;
  }

 private:
  const std::vector<Range> ranges_;
};

// Sets *range. An error if the bytes reach beyond the allocation in which they begin.
cudaError_t find_range(const void* pointer, size_t nbytes, const char* name,
                       Range* range) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  range->allocation = find_allocation(begin);
  if (!range->allocation) {
    if (!is_freed(begin)) return cudaSuccess;
    add_problem(std::string(name) + " of freed memory");
    return cudaErrorInvalidValue;
  }
  if (begin + nbytes <= range->allocation->end()) return cudaSuccess;
  add_problem(std::string(name) + " of " + std::to_string(nbytes) +
              " bytes reaches beyond the allocation");
  return cudaErrorInvalidValue;
}

cudaError_t copy_in_stream(void* to, const void* from, size_t nbytes, Stream* stream,
                           const char* name, bool* waits) {
  Range target;
  Range source;
  cudaError_t error = find_range(to, nbytes, name, &target);
  if (error == cudaSuccess) error = find_range(from, nbytes, name, &source);
  if (error != cudaSuccess) return error;
  const bool pageable = target.is_pageable() || source.is_pageable();
  if (pageable) {
    error = reject_capture(stream, name, "of pageable memory under capture");
    if (error != cudaSuccess) return error;
  }
  if (source.is_pageable() && target.is_device()) {
    const auto* const begin = static_cast<const uint8_t*>(from);
    auto staged = std::make_shared<std::vector<uint8_t>>(begin, begin + nbytes);
    auto use = std::make_shared<Use>(std::vector<Range>{target});
    return submit(stream, [=] {
      if (use->is_alive(name)) memcpy(to, staged->data(), nbytes);
    });
  }
  *waits = pageable || (!target.is_device() && !source.is_device());
  const bool is_captured = capture_of(stream) != nullptr;
  // A graph does not use memory until it is launched.
  auto use =
      is_captured ? nullptr : std::make_shared<Use>(std::vector<Range>{target, source});
  return submit(stream, [=] {
    if (use == nullptr) {
      const Use now({target, source});
      if (now.is_alive(name)) memmove(to, from, nbytes);
    } else if (use->is_alive(name)) {
      memmove(to, from, nbytes);
    }
  });
}

// Queues a copy with the behaviour of CUDA for the kinds of both ends: a pageable
// source is read before the return, a copy to pageable memory or within the host has
// ended.
cudaError_t copy(void* to, const void* from, size_t nbytes, cudaStream_t handle,
                 const char* name) {
  if (nbytes == 0) return cudaSuccess;
  Stream* const stream = find_stream(handle, name);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  bool waits = false;
  const cudaError_t error = copy_in_stream(to, from, nbytes, stream, name, &waits);
  if (error == cudaSuccess && waits && capture_of(stream) == nullptr) {
    stream->wait(stream->last());
  }
  return error;
}

// The same, and the host waits as cudaMemcpy does.
cudaError_t copy_and_wait(void* to, const void* from, size_t nbytes) {
  const cudaError_t error = copy(to, from, nbytes, cudaStreamLegacy, "cudaMemcpy");
  if (error != cudaSuccess) return error;
  Stream* const stream = legacy_stream(current_device());
  stream->wait(stream->last());
  return device_failure();
}

cudaError_t fill(void* to, int value, size_t nbytes, cudaStream_t handle,
                 const char* name) {
  if (nbytes == 0) return cudaSuccess;
  Stream* const stream = find_stream(handle, name);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  Range target;
  const cudaError_t error = find_range(to, nbytes, name, &target);
  if (error != cudaSuccess) return error;
  if (target.is_pageable()) {
    add_problem(std::string(name) + " of pageable memory");
    return cudaErrorInvalidValue;
  }
  return submit(stream, [=] {
    const Use now({target});
    if (now.is_alive(name)) memset(to, value, nbytes);
  });
}

}  // namespace
}  // namespace fakecuda

using fakecuda::fail;
using fakecuda::Kind;

namespace {

constexpr unsigned kUnsafeMemoryCall = fakecuda::kOpensContext | fakecuda::kUnsafe;

cudaError_t allocate(void** pointer, Kind kind, size_t nbytes) {
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  *pointer = fakecuda::allocate(kind, nbytes, fakecuda::current_device());
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
  return allocate(pointer, Kind::kDevice, nbytes);
}

cudaError_t cudaFree(void* pointer) {
  FAKECUDA_BEGIN("cudaFree", kUnsafeMemoryCall);
  if (pointer == nullptr) return cudaSuccess;
  const auto allocation =
      fakecuda::find_allocation(reinterpret_cast<uintptr_t>(pointer));
  if (allocation) fakecuda::synchronize(allocation->device);  // as CUDA does
  return fail(fakecuda::free_allocation(Kind::kDevice, pointer));
}

cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  FAKECUDA_BEGIN("cudaHostAlloc", kUnsafeMemoryCall);
  return allocate(pointer, Kind::kPinned, nbytes);
}

cudaError_t cudaFreeHost(void* pointer) {
  FAKECUDA_BEGIN("cudaFreeHost", kUnsafeMemoryCall);
  if (pointer == nullptr) return cudaSuccess;
  return fail(fakecuda::free_allocation(Kind::kPinned, pointer));
}

cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  FAKECUDA_BEGIN("cudaHostRegister", kUnsafeMemoryCall);
  return fail(fakecuda::register_host(pointer, nbytes, fakecuda::current_device()));
}

cudaError_t cudaHostUnregister(void* pointer) {
  FAKECUDA_BEGIN("cudaHostUnregister", kUnsafeMemoryCall);
  return fail(fakecuda::unregister_host(pointer));
}

cudaError_t cudaMemGetInfo(size_t* num_free, size_t* num_total) {
  FAKECUDA_BEGIN("cudaMemGetInfo", fakecuda::kOpensContext);
  *num_total = fakecuda::kDeviceNbytes;
  *num_free = *num_total - fakecuda::device_nbytes(fakecuda::current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* pointer) {
  // As on a GPU, this call succeeds after the device has failed.
  FAKECUDA_BEGIN("cudaPointerGetAttributes", fakecuda::kPlain);
  fakecuda::open_context(fakecuda::current_device());
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
