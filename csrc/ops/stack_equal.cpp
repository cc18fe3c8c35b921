#include "ops/stack_equal.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>

#include "core/checked.h"
#include "ops/host_memory.h"

namespace pyparallel::ops {
namespace {

bool is_equal(const at::Tensor& sample, const at::Tensor& first, int64_t nbytes,
              bool grad_mode) {
  if (!is_plain(sample) || !sample.is_cpu() || !sample.is_contiguous()) return false;
  if (sample.dtype() != first.dtype() || sample.sizes() != first.sizes()) return false;
  if (grad_mode && sample.requires_grad()) return false;
  return holds(sample, nbytes);
}

}  // namespace

bool are_equal(TensorRefs samples) {
  const at::Tensor& first = *samples[0];
  // A dispatch mode is Python code that intercepts torch's operators.
  if (!is_plain(first) || c10::impl::dispatch_mode_enabled()) return false;
  const c10::IntArrayRef sizes = first.sizes();
  int64_t nbytes = 0;
  int64_t total = 0;
  const bool fits = checked_nbytes(sizes.data(), static_cast<int64_t>(sizes.size()),
                                   static_cast<int64_t>(first.itemsize()), &nbytes) &&
                    checked_mul(nbytes, static_cast<int64_t>(samples.size()), &total);
  if (!fits) return false;
  const bool grad_mode = c10::GradMode::is_enabled();
  for (const at::Tensor* sample : samples) {
    if (!is_equal(*sample, first, nbytes, grad_mode)) return false;
  }
  return true;
}

at::Tensor new_stack(TensorRefs samples) {
  const at::Tensor& first = *samples[0];
  c10::DimVector shape{static_cast<int64_t>(samples.size())};
  shape.append(first.sizes().begin(), first.sizes().end());
  return new_host_tensor(shape, first.scalar_type());
}

void copy_equal(const at::Tensor& dst, TensorRefs samples) {
  const size_t nbytes = dst.nbytes() / samples.size();
  if (nbytes == 0) return;
  auto* to = static_cast<uint8_t*>(dst.mutable_data_ptr());
  for (const at::Tensor* sample : samples) {
    memcpy(to, sample->const_data_ptr(), nbytes);
    to += nbytes;
  }
}

}  // namespace pyparallel::ops
