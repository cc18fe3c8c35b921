// Every range of memory that CUDA knows: device memory, pinned and registered memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace fakecuda {

enum class Kind { kDevice, kPinned, kRegistered };

// Counts queued work that has yet to read or write an allocation.
using Uses = std::shared_ptr<std::atomic<int>>;

struct Allocation {
  uint64_t id;  // never used again, in contrast to the address
  uintptr_t begin;
  size_t nbytes;
  Kind kind;
  int device;
  Uses uses;

  uintptr_t end() const { return begin + nbytes; }
  bool is_host() const { return kind != Kind::kDevice; }
};

// The byte in which fresh memory differs from zeros: a read of it is visible.
constexpr int kFreshByte = 0xA5;
// Of a device.
constexpr size_t kDeviceNbytes = size_t{4} << 30;

// Allocate on a device or as pinned memory. Return null if the memory is used up.
void* allocate(Kind kind, size_t nbytes, int device);
// Freed memory becomes inaccessible, and its addresses are not used again for long.
cudaError_t free_allocation(Kind kind, void* pointer);

cudaError_t register_host(void* pointer, size_t nbytes, int device);
cudaError_t unregister_host(void* pointer);

std::optional<Allocation> find_allocation(uintptr_t address);
bool is_alive(const Allocation& allocation);
// True if `address` was freed and its addresses are still reserved.
bool is_freed(uintptr_t address);

size_t device_nbytes(int device);  // in use

}  // namespace fakecuda
