#include "ops/stack_equal.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>

#include "core/checked.h"
#include "ops/host_memory.h"

namespace pyparallel::ops {
namespace {

// Returns false unless a sample is equal to the first one, which is plain. Adds its
// first byte to `sources`.
bool add_source(const at::Tensor& sample, const at::Tensor& first, int64_t nbytes,
                bool grad_mode, std::vector<const uint8_t*>* sources) {
  // Tensors with the keys of a plain one are plain if they have a storage.
  if (sample.key_set() != first.key_set() && !is_plain(sample)) return false;
  const c10::TensorImpl& impl = *sample.unsafeGetTensorImpl();
  const c10::Storage& storage = impl.unsafe_storage();
  if (!storage || !sample.is_cpu() || !sample.is_contiguous()) return false;
  if (sample.dtype() != first.dtype() || sample.sizes() != first.sizes()) return false;
  if (grad_mode && impl.autograd_meta() != nullptr && sample.requires_grad()) {
    return false;
  }
  if (nbytes == 0) {
    sources->push_back(nullptr);
    return true;
  }
  int64_t offset = 0;
  int64_t end = 0;
  const bool held = checked_mul(sample.storage_offset(),
                                static_cast<int64_t>(first.itemsize()), &offset) &&
                    checked_add(offset, nbytes, &end) &&
                    static_cast<uint64_t>(end) <= storage.nbytes();
  if (held) sources->push_back(static_cast<const uint8_t*>(storage.data()) + offset);
  return held;
}

}  // namespace

std::vector<const uint8_t*> equal_sources(TensorRefs samples) {
  const at::Tensor& first = *samples[0];
  // A dispatch mode is Python code that intercepts torch's operators.
  if (!is_plain(first) || c10::impl::dispatch_mode_enabled()) return {};
  const c10::IntArrayRef sizes = first.sizes();
  int64_t nbytes = 0;
  int64_t total = 0;
  const bool fits = checked_nbytes(sizes.data(), static_cast<int64_t>(sizes.size()),
                                   static_cast<int64_t>(first.itemsize()), &nbytes) &&
                    checked_mul(nbytes, static_cast<int64_t>(samples.size()), &total);
  if (!fits) return {};
  const bool grad_mode = c10::GradMode::is_enabled();
  std::vector<const uint8_t*> sources;
  sources.reserve(samples.size());
  for (const at::Tensor* sample : samples) {
    if (!add_source(*sample, first, nbytes, grad_mode, &sources)) return {};
  }
  return sources;
}

at::Tensor new_stack(TensorRefs samples) {
  const at::Tensor& first = *samples[0];
  c10::DimVector shape{static_cast<int64_t>(samples.size())};
  shape.append(first.sizes().begin(), first.sizes().end());
  return new_host_tensor(shape, first.scalar_type());
}

void copy_equal(const at::Tensor& dst, const std::vector<const uint8_t*>& sources) {
  const size_t nbytes = dst.nbytes() / sources.size();
  if (nbytes == 0) return;
  auto* to = static_cast<uint8_t*>(dst.mutable_data_ptr());
  for (const uint8_t* source : sources) {
    memcpy(to, source, nbytes);
    to += nbytes;
  }
}

}  // namespace pyparallel::ops
