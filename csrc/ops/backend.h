// What a kind of device can do, and the registry of those that were compiled in. A
// device is present because its source file was built and registered itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <vector>

#include "core/boxes.h"
#include "core/image/job.h"
#include "core/pack.h"
#include "transfer/runtime.h"

namespace pyparallel::ops {

// Functions may queue work on the device's current stream. They must be done with the
// tables they were given, though not with dst and the sources, when they return.
struct Backend {
  // `mask` marks where `table` has data; without boxes, none is made.
  void (*pad_copy)(const BoxTable& table, const BoxTable& mask, c10::Device device);
  at::Tensor (*contiguous)(const at::Tensor& strided);
  void (*pack)(const Pack& body, c10::Device device);  // chooses body.piece itself
  void (*image_batch)(const ImageJob& job, c10::Device device);
  // Sends to the device; null if nothing can be sent there but by torch.
  transfer::Runtime* (*runtime)() = nullptr;
};

// Call at static initialisation only. Returns true, to initialise a constant with.
bool register_backend(c10::DeviceType type, Backend backend);

// Null when nothing was registered for this type.
const Backend* find_backend(c10::DeviceType type);

// CPU first, then in the order of torch's device types.
std::vector<c10::DeviceType> registered_devices();

}  // namespace pyparallel::ops
