#include "ops/host_memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <memory>
#include <new>

#include "core/checked.h"
#include "memory/block_cache.h"

namespace pyparallel::ops {
namespace {

// malloc recycles smaller tensors well.
constexpr int64_t kRecycledBytes = 1 << 20;

void give_back(void* context) {
  const std::unique_ptr<memory::Block> block(static_cast<memory::Block*>(context));
  memory::give_block(*block);
}

class RecyclingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::kCPU};
    auto block = std::make_unique<memory::Block>();
    try {
      *block = memory::take_block(static_cast<int64_t>(nbytes));
    } catch (const std::bad_alloc&) {
      TORCH_CHECK(false, "there must be ", nbytes, " bytes of memory for a batch, but ",
                  "the system has none left.");
    }
    void* const data = block->data;
    return {data, block.release(), give_back, c10::kCPU};
  }

  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    default_copy_data(dst, src, nbytes);
  }
};

bool is_large(c10::IntArrayRef shape, c10::ScalarType dtype) {
  int64_t nbytes = 0;
  const bool fits =
      checked_nbytes(shape.data(), static_cast<int64_t>(shape.size()),
                     static_cast<int64_t>(c10::elementSize(dtype)), &nbytes);
  return fits && nbytes >= kRecycledBytes;
}

}  // namespace

at::Tensor new_host_tensor(c10::IntArrayRef shape, c10::ScalarType dtype) {
  if (!is_large(shape, dtype) || at::globalContext().deterministicAlgorithms()) {
    return at::empty(shape, at::TensorOptions(dtype));
  }
  // Never destroyed, because the storages of the last tensors still point to it.
  static auto* const allocator = new RecyclingAllocator;
  return at::detail::empty_generic(shape, allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

}  // namespace pyparallel::ops
