#include "ops/tensor_bytes.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/DimVector.h>

#include <cstring>

#include "core/checked.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {
namespace {

constexpr size_t kHeaderBytes = 2;

bool is_sent(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_cpu() && !tensor.requires_grad() &&
         tensor.is_contiguous();
}

bool is_dtype(uint8_t code) {
  return code < static_cast<uint8_t>(c10::ScalarType::Undefined) &&
         !c10::isQIntType(static_cast<c10::ScalarType>(code));
}

}  // namespace

bool append_tensor(const at::Tensor& tensor, int64_t* left, std::string* message) {
  if (!is_sent(tensor)) return false;
  const c10::IntArrayRef sizes = tensor.sizes();
  const auto ndim = static_cast<int64_t>(sizes.size());
  int64_t nbytes = 0;
  const bool fits = ndim <= UINT8_MAX &&
                    checked_nbytes(sizes.data(), ndim,
                                   static_cast<int64_t>(tensor.itemsize()), &nbytes) &&
                    nbytes <= *left && holds(tensor, nbytes);
  if (!fits) return false;
  *left -= nbytes;
  message->push_back(static_cast<char>(tensor.scalar_type()));
  message->push_back(static_cast<char>(ndim));
  message->append(reinterpret_cast<const char*>(sizes.data()),
                  sizes.size() * sizeof(int64_t));
  if (nbytes > 0) {
    message->append(static_cast<const char*>(tensor.const_data_ptr()),
                    static_cast<size_t>(nbytes));
  }
  return true;
}

at::Tensor take_tensor(std::string_view* rest) {
  if (rest->size() < kHeaderBytes || !is_dtype(static_cast<uint8_t>((*rest)[0]))) {
    return {};
  }
  const auto dtype = static_cast<c10::ScalarType>((*rest)[0]);
  const auto ndim = static_cast<uint8_t>((*rest)[1]);
  const size_t width = ndim * sizeof(int64_t);
  if (rest->size() - kHeaderBytes < width) return {};
  c10::DimVector sizes;
  for (size_t d = 0; d < ndim; ++d) {
    int64_t size = 0;
    memcpy(&size, rest->data() + kHeaderBytes + d * sizeof size, sizeof size);
    sizes.push_back(size);
  }
  rest->remove_prefix(kHeaderBytes + width);
  int64_t nbytes = 0;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  if (!checked_nbytes(sizes.data(), ndim, itemsize, &nbytes)) return {};
  if (rest->size() < static_cast<uint64_t>(nbytes)) return {};
  at::Tensor tensor = at::detail::empty_cpu(sizes, dtype);
  if (nbytes > 0) {
    memcpy(tensor.mutable_data_ptr(), rest->data(), static_cast<size_t>(nbytes));
  }
  rest->remove_prefix(static_cast<size_t>(nbytes));
  return tensor;
}

}  // namespace pyparallel::ops
