#include "ops/pack.h"

#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include "core/checked.h"
#include "ops/cast.h"

namespace pyparallel::ops {
namespace {

constexpr Where kPackDst{"pack", "dst"};
constexpr Where kSlab{"views", "slab"};
constexpr Where kTensor{"memory_of", "tensor"};

// A storage of some bytes of a slab, which keeps the slab alive. It has the context of
// the slab's storage: torch's allocator of pinned memory finds the block of a copy by
// it. See Note: [slot storages].
class SlotStorage final : public c10::StorageImpl {
 public:
  SlotStorage(const c10::Storage& slab, int64_t first, int64_t nbytes)
      : StorageImpl(use_byte_size_t(), nbytes,
                    c10::DataPtr(static_cast<uint8_t*>(slab.mutable_data()) + first,
                                 slab.data_ptr().get_context(), nullptr, slab.device()),
                    nullptr, false),
        slab_(slab) {}

  // Called instead of the destructor while weak references remain.
  void release_resources() override {
    StorageImpl::release_resources();
    slab_ = c10::Storage();
  }

  // Returns false after torch moved this storage to other memory, as share_memory_()
  // does.
  bool is_in_slab() const {
    const auto begin = reinterpret_cast<uintptr_t>(slab_.data());
    const auto first = reinterpret_cast<uintptr_t>(data());
    return begin <= first && first + nbytes() <= begin + slab_.nbytes();
  }

  const c10::Storage& slab() const { return slab_; }

 private:
  c10::Storage slab_;
};

// Returns a storage of some bytes of a slab. An empty storage does not keep the slab.
c10::Storage new_slot(const c10::Storage& slab, int64_t first, int64_t nbytes) {
  if (nbytes > 0) {
    return c10::Storage(c10::make_intrusive<SlotStorage>(slab, first, nbytes));
  }
  return {c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kCPU), true};
}

at::Tensor new_tensor(c10::Storage storage, c10::DispatchKeySet keys,
                      c10::ScalarType dtype, int64_t offset, c10::IntArrayRef shape) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous(shape);
  return tensor;
}

void check_planned(const at::Tensor& leaf, const PlannedLeaf& planned,
                   c10::Device device, const Where& where) {
  check_plain(leaf, where);
  TORCH_CHECK_VALUE(leaf.device() == device, where, " must be on the device of dst, ",
                    device.str(), ", but is on ", leaf.device().str(),
                    ". Move it first.");
  TORCH_CHECK_VALUE(
      leaf.scalar_type() == planned.dtype && leaf.sizes() == planned.shape, where,
      " must have dtype ", dtype_name(planned.dtype), " and shape ",
      Tuple{planned.shape}, ", as planned, but has ", dtype_name(leaf.scalar_type()),
      " and ", Tuple{leaf.sizes()}, ".");
}

// Lanes that share the work write words: see core/pack.h.
void check_words(const Snapshot& dst) {
  const auto address = reinterpret_cast<uintptr_t>(dst.mutable_data());
  TORCH_CHECK_VALUE(dst.device.is_cpu() || address % kWordBytes == 0, kPackDst,
                    " must start at a multiple of ", kWordBytes,
                    " bytes, but starts at byte ", dst.offset, " of its storage.");
}

}  // namespace

bool can_pack(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_cpu() &&
         !(tensor.requires_grad() && c10::GradMode::is_enabled()) &&
         !tensor._fw_grad(/*level=*/0).defined();
}

LeafBytes::LeafBytes(const char* op, size_t num, c10::Device device)
    : op_(op), device_(device), backend_(find_backend(device.type())) {
  storages_.reserve(num);
  slots_.reserve(num);
}

void LeafBytes::add(TensorRefs leaves, const SlabPlan& plan, const Snapshot& dst) {
  TORCH_CHECK_VALUE(leaves.size() == plan.leaves().size(), op_, ": leaves must have ",
                    plan.leaves().size(), " entries, as planned, but has ",
                    leaves.size(), ".");
  for (size_t i = 0; i < leaves.size(); ++i) {
    const PlannedLeaf& planned = plan.leaves()[i];
    const Where where{op_, "leaves", static_cast<int64_t>(i)};
    check_planned(*leaves[i], planned, device_, where);
    const uint8_t* const src = add(*leaves[i], planned);
    if (src != nullptr) check_apart(src, planned.nbytes, dst, where);
  }
}

const uint8_t* LeafBytes::add(const at::Tensor& leaf, const PlannedLeaf& planned) {
  const size_t index = slots_.size();
  Slot& slot = slots_.emplace_back(Slot{nullptr, planned.offset, planned.nbytes});
  const Cast cast = cast_of(leaf.scalar_type(), planned.dtype);
  if (cast != Cast::kNone || !casts_.empty()) {
    casts_.resize(slots_.size());
    casts_.back() = cast;
  }
  if (leaf.is_contiguous() && holds(leaf, static_cast<int64_t>(leaf.nbytes()))) {
    if (planned.nbytes == 0) return nullptr;
    slot.src = static_cast<const uint8_t*>(leaf.const_data_ptr());
    storages_.push_back(leaf.storage());
    return slot.src;
  }
  const Where where{op_, "leaves", static_cast<int64_t>(index)};
  Snapshot& snapshot = strided_.emplace_back();
  places_.push_back(index);
  take_snapshot(leaf, where, &snapshot);
  check_storage(snapshot, where);
  return nullptr;
}

const std::vector<Slot>& LeafBytes::read() {
  for (size_t i = 0; i < strided_.size(); ++i) {
    slots_[places_[i]].src = contiguous_bytes(&strided_[i], *backend_);
  }
  return slots_;
}

PackJob::PackJob(const at::Tensor& dst, TensorRefs leaves, const SlabPlan& plan)
    : dst_(take_slab(dst, kPackDst, plan)), backend_(find_backend(dst_.device.type())) {
  TORCH_CHECK_NOT_IMPLEMENTED(backend_ != nullptr, kPackDst,
                              " must be on a device that this build knows, but is on ",
                              dst_.device.str(), ". Use the pure Python backend.");
  check_words(dst_);
  leaves_.emplace("pack", leaves.size(), dst_.device).add(leaves, plan, dst_);
}

void PackJob::run() {
  if (dst_.nbytes == 0) return;
  const std::vector<Slot>& slots = leaves_->read();
  const Pack body{dst_.mutable_data(), dst_.nbytes, 1, slots.data(),
                  static_cast<int64_t>(slots.size())};
  backend_->pack(body, dst_.device);
}

Snapshot take_slab(const at::Tensor& slab, const Where& where, const SlabPlan& plan) {
  Snapshot snapshot;
  take_snapshot(slab, where, &snapshot);
  check_slab(snapshot, where, false);
  check_storage(snapshot, where);
  TORCH_CHECK_VALUE(snapshot.nbytes == plan.nbytes(), where, " must have ",
                    plan.nbytes(), " bytes, as planned, but has ", snapshot.nbytes,
                    ".");
  return snapshot;
}

std::vector<at::Tensor> make_views(const at::Tensor& slab, const SlabPlan& plan) {
  const Snapshot base = take_slab(slab, kSlab, plan);
  std::vector<at::Tensor> views;
  views.reserve(plan.leaves().size());
  for (const PlannedLeaf& leaf : plan.leaves()) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(leaf.dtype));
    TORCH_CHECK_VALUE(base.offset % itemsize == 0, kSlab,
                      " must start at a multiple of ", itemsize,
                      " bytes, the item size of ", dtype_name(leaf.dtype),
                      ", but starts at byte ", base.offset, " of its storage.");
    const int64_t first = base.offset + leaf.offset;
    const bool own = base.device.is_cpu();
    c10::Storage storage =
        own ? new_slot(base.storage, first, leaf.nbytes) : c10::Storage(base.storage);
    views.push_back(new_tensor(std::move(storage), slab.key_set(), leaf.dtype,
                               own ? 0 : first / itemsize, leaf.shape));
  }
  return views;
}

std::vector<at::Tensor> make_views(const std::vector<at::Tensor>& blocks,
                                   const std::vector<size_t>& direct,
                                   const std::vector<PlannedLeaf>& leaves) {
  std::vector<at::Tensor> views;
  views.reserve(leaves.size());
  size_t num_direct = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const bool is_direct = num_direct < direct.size() && direct[num_direct] == i;
    const at::Tensor& block = blocks[is_direct ? ++num_direct : 0];
    const auto itemsize = static_cast<int64_t>(c10::elementSize(leaves[i].dtype));
    views.push_back(new_tensor(c10::Storage(block.storage()), block.key_set(),
                               leaves[i].dtype, leaves[i].offset / itemsize,
                               leaves[i].shape));
  }
  return views;
}

void forbid_use(const at::Tensor& tensor, const std::string& message) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

c10::Storage memory_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto* slot = dynamic_cast<SlotStorage*>(storage.unsafeGetStorageImpl());
  return slot != nullptr && slot->is_in_slab() ? slot->slab() : storage;
}

at::Tensor memory_of(const at::Tensor& tensor) {
  check_plain(tensor, kTensor);
  c10::Storage storage = memory_storage(tensor);
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  return new_tensor(std::move(storage), tensor.key_set(), c10::kByte, 0, nbytes);
}

}  // namespace pyparallel::ops
