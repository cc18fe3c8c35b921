// Tensors of torch that stand for a CUDA tensor: of the host, or without values.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>

#include "host_kernel.h"

namespace fakecuda {

// Calls `change` with each tensor of an argument or a result.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

// A tensor of the host with the memory of a CUDA tensor; a copy of a host tensor, since
// its memory may change before the stream is there.
at::Tensor host_alias(const at::Tensor& tensor);

// A tensor of the same shape: without values, or zeros of the host, which are also fine
// as indices.
at::Tensor meta_like(const at::Tensor& tensor);
at::Tensor zeros_like(const at::Tensor& tensor);

HostKernel::Range range_of(const at::Tensor& tensor);

// A generator of the host whose seed follows from the state of the CUDA generator,
// which advances. Without `given`, the default generator of the device.
at::Generator host_generator(const c10::IValue& given, c10::DeviceIndex device);

}  // namespace fakecuda
