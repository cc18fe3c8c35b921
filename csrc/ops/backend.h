// The functions of a device type, and the registry of the compiled device types. A
// device is present because its source file was built and registered itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <vector>

#include "core/boxes.h"
#include "core/cast.h"
#include "core/image/job.h"
#include "core/pack.h"
#include "transfer/runtime.h"

namespace pyparallel::ops {

// The functions may queue work on the current stream of the device. When they return,
// the tables may be freed; dst and the sources must live until the work is done.
struct Backend {
  // Also writes a mask of the data of `table` if `mask` has boxes.
  void (*pad_copy)(const BoxTable& table, const BoxTable& mask, c10::Device device);
  at::Tensor (*contiguous)(const at::Tensor& strided);
  void (*pack)(const Pack& body, c10::Device device);  // sets body.piece
  void (*image_batch)(const ImageJob& job, c10::Device device);
  // The runtime of the transfer engine; null if only torch copies to this device.
  transfer::Runtime* (*runtime)() = nullptr;
  // Returns true if torch's allocator calls reclaim_memory before it fails; null if
  // not.
  bool (*reclaims)() = nullptr;
  // As pad_copy, with a cast of the sources; null if the device has none.
  void (*cast_copy)(const BoxTable& table, const BoxTable& mask, Cast cast) = nullptr;
};

// Call this at static initialisation only. Returns true, as the value of a constant.
bool register_backend(c10::DeviceType type, Backend backend);

// Returns null if the type is not registered.
const Backend* find_backend(c10::DeviceType type);

// Gives the memory of dropped batches to torch's allocator, which has no free block on
// the device. If it is for a batch, `num_free(index)` returns the bytes that the device
// has left. Does not throw.
void reclaim_memory(c10::Device device, int64_t (*num_free)(int64_t index)) noexcept;

// Returns the CPU first, then the others in the order of torch's device types.
std::vector<c10::DeviceType> registered_devices();

}  // namespace pyparallel::ops
