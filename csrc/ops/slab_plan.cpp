#include "ops/slab_plan.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include "core/checked.h"
#include "core/pack.h"

namespace pyparallel::ops {
namespace {

constexpr char kPlanSlab[] = "plan_slab";

// Checks a leaf of a plan from outside. Sets its nbytes and `end`.
void check_leaf(PlannedLeaf* leaf, int64_t index, int64_t* end) {
  const auto where = [&](const char* argument) {
    return Where{"SlabPlan", argument, index};
  };
  TORCH_CHECK_TYPE(
      !c10::isQIntType(leaf->dtype) && leaf->dtype != c10::ScalarType::Undefined,
      where("dtypes"), " must be a dtype of plain tensors, but is ",
      dtype_name(leaf->dtype), ".");
  for (int64_t size : leaf->shape) {
    TORCH_CHECK_VALUE(size >= 0, where("shapes"),
                      " must have no negative size, but is ", Tuple{leaf->shape}, ".");
  }
  const auto ndim = static_cast<int64_t>(leaf->shape.size());
  const auto itemsize = static_cast<int64_t>(c10::elementSize(leaf->dtype));
  TORCH_CHECK_VALUE(checked_nbytes(leaf->shape.data(), ndim, itemsize, &leaf->nbytes),
                    where("shapes"), " must have fewer than 2**63 bytes, but is ",
                    Tuple{leaf->shape}, ".");
  TORCH_CHECK_VALUE(slot_ascends(leaf->offset, *end) && is_aligned(leaf->offset),
                    where("offsets"), " must be a multiple of ", kSlotAlignment,
                    " and at least ", *end, ", the end of the leaf before it, but is ",
                    leaf->offset, ".");
  TORCH_CHECK_VALUE(checked_add(leaf->offset, leaf->nbytes, end), where("offsets"),
                    " must leave room for ", leaf->nbytes,
                    " bytes below 2**63, but is ", leaf->offset, ".");
}

}  // namespace

bool PlannedLeaf::operator==(const PlannedLeaf& other) const {
  return offset == other.offset && dtype == other.dtype && shape == other.shape;
}

SlabPlan::SlabPlan(TensorRefs leaves) {
  leaves_.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    check_plain(*leaves[i], {kPlanSlab, "leaves", static_cast<int64_t>(i)});
    const at::Tensor& leaf = *leaves[i];
    leaves_.push_back(plan_leaf(leaf, leaf.scalar_type(), kPlanSlab, i, &nbytes_));
  }
}

SlabPlan::SlabPlan(std::vector<PlannedLeaf> leaves, int64_t nbytes)
    : leaves_(std::move(leaves)), nbytes_(nbytes) {
  int64_t end = 0;
  int64_t index = 0;
  for (PlannedLeaf& leaf : leaves_) check_leaf(&leaf, index++, &end);
  TORCH_CHECK_VALUE(nbytes >= end && is_aligned(nbytes),
                    "SlabPlan: nbytes must be a multiple of ", kSlotAlignment,
                    " and at least ", end, ", the end of the last leaf, but is ",
                    nbytes, ".");
}

bool SlabPlan::operator==(const SlabPlan& other) const {
  return nbytes_ == other.nbytes_ && leaves_ == other.leaves_;
}

PlannedLeaf plan_leaf(const at::Tensor& leaf, c10::ScalarType dtype, const char* op,
                      size_t index, int64_t* nbytes) {
  const c10::IntArrayRef sizes = leaf.sizes();
  PlannedLeaf planned{*nbytes, 0, dtype, c10::DimVector(sizes)};
  const auto itemsize = static_cast<int64_t>(c10::elementSize(planned.dtype));
  const bool fits = checked_nbytes(sizes.data(), static_cast<int64_t>(sizes.size()),
                                   itemsize, &planned.nbytes) &&
                    next_slot(*nbytes, planned.nbytes, nbytes);
  TORCH_CHECK_VALUE(fits, op, ": leaves must have fewer than 2**63 bytes together, ",
                    "but leaves[", index, "] goes beyond.");
  return planned;
}

size_t SlabPlan::hash() const {
  size_t seed = static_cast<size_t>(nbytes_);
  for (const PlannedLeaf& leaf : leaves_) {
    seed = c10::hash_combine(seed, static_cast<size_t>(leaf.offset));
    seed = c10::hash_combine(seed, static_cast<size_t>(leaf.dtype));
    for (int64_t size : leaf.shape) {
      seed = c10::hash_combine(seed, static_cast<size_t>(size));
    }
  }
  return seed;
}

}  // namespace pyparallel::ops
