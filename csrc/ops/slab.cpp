#include "ops/slab.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include "core/checked.h"

namespace pyparallel::ops {
namespace {

constexpr Where kDst{"pack", "dst"};
constexpr Where kSlab{"views", "slab"};

void check_slot(const Slot& slot, int64_t index, int64_t* begin, int64_t slab_nbytes) {
  const Where where{"pack", "offsets", index};
  if (!slot_ascends(slot.offset, *begin)) {
    const std::string limit = index == 0
                                  ? "start of dst"
                                  : "end of leaves[" + std::to_string(index - 1) + "]";
    TORCH_CHECK_VALUE(false, where, " must be at least ", *begin, ", the ", limit,
                      ", but is ", slot.offset, ".");
  }
  const bool fits = slot_fits(slot.offset, slot.nbytes, slab_nbytes, begin);
  TORCH_CHECK_VALUE(fits, where, " must leave room for ", slot.nbytes,
                    " bytes in dst, which has ", slab_nbytes, ", but is ", slot.offset,
                    ".");
}

// Whether one view lies within the slab, on whole items of the storage.
void check_view(const ViewSpec& spec, int64_t index, const Snapshot& slab) {
  const auto at = [&](const char* argument) { return Where{"views", argument, index}; };
  TORCH_CHECK_TYPE(
      !c10::isQIntType(spec.dtype) && spec.dtype != c10::ScalarType::Undefined,
      at("dtypes"), " must be a dtype of plain tensors, but is ",
      dtype_name(spec.dtype), ".");
  const auto itemsize = static_cast<int64_t>(c10::elementSize(spec.dtype));
  for (int64_t size : spec.shape) {
    TORCH_CHECK_VALUE(size >= 0, at("shapes"), " must have no negative size, but is ",
                      Tuple{spec.shape}, ".");
  }
  int64_t nbytes = 0;
  const auto ndim = static_cast<int64_t>(spec.shape.size());
  TORCH_CHECK_VALUE(checked_nbytes(spec.shape.data(), ndim, itemsize, &nbytes),
                    at("shapes"), " must have fewer than 2**63 bytes, but is ",
                    Tuple{spec.shape}, ".");
  TORCH_CHECK_VALUE(spec.offset >= 0, at("offsets"), " must be at least 0, but is ",
                    spec.offset, ".");
  TORCH_CHECK_VALUE(spec.offset % itemsize == 0, at("offsets"),
                    " must be a multiple of ", itemsize, ", the item size of ",
                    dtype_name(spec.dtype), ", but is ", spec.offset, ".");
  TORCH_CHECK_VALUE(slab.offset % itemsize == 0, kSlab, " must start at a multiple of ",
                    itemsize, " bytes, the item size ", "of ", dtype_name(spec.dtype),
                    ", but starts at byte ", slab.offset, " of its storage.");
  int64_t end = 0;
  TORCH_CHECK_VALUE(slot_fits(spec.offset, nbytes, slab.nbytes, &end), at("offsets"),
                    " must leave room for ", nbytes, " bytes in slab, which has ",
                    slab.nbytes, ", but is ", spec.offset, ".");
}

}  // namespace

PackJob::PackJob(const at::Tensor& dst, TensorRefs leaves,
                 const std::vector<int64_t>& offsets) {
  take_snapshot(dst, kDst, &dst_);
  check_slab(dst_, kDst, true);
  check_storage(dst_, kDst);
  TORCH_CHECK_VALUE(offsets.size() == leaves.size(), "pack: offsets must have ",
                    leaves.size(), " entries, one for each leaf, but has ",
                    offsets.size(), ".");
  leaves_.reserve(leaves.size());
  slots_.reserve(leaves.size());
  int64_t end = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const Where where{"pack", "leaves", index};
    Snapshot& leaf = leaves_.emplace_back();
    take_snapshot(*leaves[i], where, &leaf);
    TORCH_CHECK_VALUE(leaf.device.is_cpu(), where, " must be on the CPU, but is on ",
                      leaf.device.str(), ". Move it first.");
    check_storage(leaf, where);
    if (leaf.contiguous) check_apart(leaf, dst_, where);
    slots_.push_back({nullptr, offsets[i], leaf.nbytes});
    check_slot(slots_.back(), index, &end, dst_.nbytes);
  }
}

void PackJob::run() {
  if (dst_.nbytes == 0) return;
  const Backend* backend = find_backend(c10::kCPU);
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].src = contiguous_bytes(&leaves_[i], *backend);
  }
  backend->pack({dst_.mutable_data(), dst_.nbytes, 1, slots_.data(),
                 static_cast<int64_t>(slots_.size())});
}

std::vector<at::Tensor> make_views(const at::Tensor& slab,
                                   const std::vector<ViewSpec>& specs) {
  Snapshot base;
  take_snapshot(slab, kSlab, &base);
  check_slab(base, kSlab, false);
  check_storage(base, kSlab);
  std::vector<at::Tensor> views;
  views.reserve(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const ViewSpec& spec = specs[i];
    check_view(spec, static_cast<int64_t>(i), base);
    const auto itemsize = static_cast<int64_t>(c10::elementSize(spec.dtype));
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(base.storage), slab.key_set(),
        c10::scalarTypeToTypeMeta(spec.dtype));
    c10::TensorImpl* impl = view.unsafeGetTensorImpl();
    impl->set_storage_offset((base.offset + spec.offset) / itemsize);
    impl->set_sizes_contiguous(spec.shape);
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace pyparallel::ops
