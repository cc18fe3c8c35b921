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

// Where leaves lie in one slab: ascending and disjoint, within its bytes. Immutable, so
// that who has a plan need not look at these numbers again.
class SlabPlan {
 public:
  // A plan for leaves like these. TypeError unless they are plain.
  explicit SlabPlan(TensorRefs leaves);
  // A plan of numbers from outside; their nbytes are not looked at. ValueError unless
  // they are good.
  SlabPlan(std::vector<PlannedLeaf> leaves, int64_t nbytes);

  const std::vector<PlannedLeaf>& leaves() const { return leaves_; }
  int64_t nbytes() const { return nbytes_; }  // of the slab, a multiple of 64

  bool operator==(const SlabPlan& other) const;
  size_t hash() const;

 private:
  std::vector<PlannedLeaf> leaves_;
  int64_t nbytes_ = 0;
};

}  // namespace pyparallel::ops
