#include "torch_tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <mutex>

namespace fakecuda {

using at::Tensor;
using c10::IValue;

namespace {

// Each call draws fewer numbers than this.
constexpr uint64_t kOffsetStep = 4;

Tensor with_number_flag(Tensor to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_wrapped_number(
      from.unsafeGetTensorImpl()->is_wrapped_number());
  return to;
}

}  // namespace

IValue map_tensors(const IValue& value,
                   const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool has_tensor = tensor.has_value() && tensor->defined();
      changed.push_back(has_tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    }
    return changed;
  }
  return value;
}

Tensor host_alias(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  if (tensor.is_sparse()) return tensor.to(c10::Device(at::kCPU));
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  Tensor alias =
      at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor meta_like(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

Tensor zeros_like(const Tensor& tensor) {
  if (!tensor.is_cuda()) return with_number_flag(tensor.clone(), tensor);
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_();
}

HostKernel::Range range_of(const Tensor& tensor) {
  size_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    extent += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  return {tensor.data_ptr(), tensor.numel() == 0 ? 0 : extent * tensor.element_size()};
}

at::Generator host_generator(const IValue& given, c10::DeviceIndex device) {
  at::Generator generator = given.isNone()
                                ? at::globalContext().defaultGenerator(
                                      c10::Device(c10::DeviceType::CUDA, device))
                                : given.toGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kOffsetStep);
  return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() + offset);
}

}  // namespace fakecuda
