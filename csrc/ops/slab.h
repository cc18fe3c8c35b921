#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/slots.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// Writes the bytes of leaf i, in contiguous order, at offsets[i] of a slab in host
// memory, and zero everywhere else. The GIL and run(): as for PadCopyJob.
class PackJob {
 public:
  PackJob(const at::Tensor& dst, TensorRefs leaves,
          const std::vector<int64_t>& offsets);

  int64_t nbytes() const { return dst_.nbytes; }
  void run();

 private:
  Snapshot dst_;
  std::vector<Snapshot> leaves_;
  std::vector<Slot> slots_;
};

struct ViewSpec {
  int64_t offset;  // bytes
  c10::ScalarType dtype;
  c10::DimVector shape;
};

// Contiguous tensors without autograd history that share the storage of `slab`.
std::vector<at::Tensor> make_views(const at::Tensor& slab,
                                   const std::vector<ViewSpec>& specs);

}  // namespace pyparallel::ops
