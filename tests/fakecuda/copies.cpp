#include "copies.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "allocations.h"
#include "calls.h"
#include "capture.h"

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
    add_to_count("pageable H2D");
    const auto* const begin = static_cast<const uint8_t*>(from);
    auto staged = std::make_shared<std::vector<uint8_t>>(begin, begin + nbytes);
    auto use = std::make_shared<Use>(std::vector<Range>{target});
    return submit(stream, [=] {
      if (use->is_alive(name)) memcpy(to, staged->data(), nbytes);
    });
  }
  if (target.is_pageable() && source.is_device()) add_to_count("pageable D2H");
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

}  // namespace

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

}  // namespace fakecuda
