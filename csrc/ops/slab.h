#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/slots.h"
#include "ops/slab_plan.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// Writes the bytes of the leaves, each in contiguous order, into a slab on their
// device, where the plan has them, and zero everywhere else. The GIL and run(): as for
// PadCopyJob.
class PackJob {
 public:
  PackJob(const at::Tensor& dst, TensorRefs leaves, const SlabPlan& plan);

  int64_t nbytes() const { return dst_.nbytes; }
  void run();

 private:
  Snapshot dst_;
  const Backend* backend_ = nullptr;
  std::vector<c10::Storage> held_;  // of contiguous leaves: see Note: [read once]
  std::vector<Snapshot> strided_;   // leaves that have to be made contiguous
  std::vector<size_t> places_;      // in slots_, of strided_
  std::vector<Slot> slots_;
};

// Contiguous tensors without autograd history that share the storage of `slab`.
std::vector<at::Tensor> make_views(const at::Tensor& slab, const SlabPlan& plan);

}  // namespace pyparallel::ops
