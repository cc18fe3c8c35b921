// Small CPU tensors as bytes: dtype, number of dimensions (a byte each), sizes, data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace pyparallel::ops {

// Appends a tensor and subtracts its bytes from *left. Returns false, without a change,
// unless the tensor is plain, contiguous, within its storage, on the CPU, without
// gradients, and of at most *left bytes.
bool append_tensor(const at::Tensor& tensor, int64_t* left, std::string* message);

// Makes a tensor with memory of its own of the first bytes of `rest`, and removes
// these. Returns an undefined tensor if they are damaged.
at::Tensor take_tensor(std::string_view* rest);

}  // namespace pyparallel::ops
