#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <vector>

#include "ops/snapshot.h"

namespace pyparallel::ops {

struct PlannedLeaf {
  int64_t offset;  // bytes, a multiple of 64
  int64_t nbytes;
  c10::ScalarType dtype;
  c10::DimVector shape;

  bool operator==(const PlannedLeaf& other) const;
};

// The places of leaves in one slab: ascending, disjoint and within the slab. Immutable,
// so that the users of a plan need not check it again.
class SlabPlan {
 public:
  // Plans a slab for these leaves. Throws TypeError unless they are plain.
  explicit SlabPlan(TensorRefs leaves);
  // Makes a plan of numbers from outside and ignores their nbytes. Throws ValueError
  // unless they make a valid plan.
  SlabPlan(std::vector<PlannedLeaf> leaves, int64_t nbytes);

  const std::vector<PlannedLeaf>& leaves() const { return leaves_; }
  int64_t nbytes() const { return nbytes_; }  // of the slab, a multiple of 64

  bool operator==(const SlabPlan& other) const;
  size_t hash() const;

 private:
  std::vector<PlannedLeaf> leaves_;
  int64_t nbytes_ = 0;
};

// Returns the place of `leaves[index]` behind the first *nbytes of a slab, and adds its
// slot to *nbytes. The leaf must be plain, and has `dtype` in the slab. `op` is the
// operator in messages.
PlannedLeaf plan_leaf(const at::Tensor& leaf, c10::ScalarType dtype, const char* op,
                      size_t index, int64_t* nbytes);

}  // namespace pyparallel::ops
