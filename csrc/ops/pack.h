#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/pack.h"
#include "ops/slab_plan.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// The bytes of leaves, in contiguous order, for the slots that a plan has for them.
class LeafBytes {
 public:
  // `op` is who asks; `dst` is what none of the leaves may overlap; `device` is theirs.
  LeafBytes(const char* op, TensorRefs leaves, const SlabPlan& plan,
            const Snapshot& dst, c10::Device device);

  // Valid while this lives. May run without the GIL: copies strided leaves.
  const std::vector<Slot>& read();

 private:
  const Backend* backend_;
  std::vector<c10::Storage> storages_;  // of contiguous leaves: see Note: [read once]
  std::vector<Snapshot> strided_;       // leaves that have to be made contiguous
  std::vector<size_t> places_;          // in slots_, of strided_
  std::vector<Slot> slots_;
};

// Writes the bytes of the leaves, each in contiguous order, into a slab on their
// device, where the plan has them, and zero everywhere else. The GIL and run(): as for
// PadCopyJob.
class PackJob {
 public:
  PackJob(const at::Tensor& dst, TensorRefs leaves, const SlabPlan& plan);

  int64_t nbytes() const { return dst_.nbytes; }
  // Whether run() calls no driver.
  bool on_host() const { return dst_.device.is_cpu(); }
  void run();

 private:
  Snapshot dst_;
  const Backend* backend_;
  std::optional<LeafBytes> leaves_;
};

// A snapshot of a slab of as many bytes as planned. ValueError unless it is one.
Snapshot take_slab(const at::Tensor& slab, const Where& where, const SlabPlan& plan);

// Contiguous tensors without autograd history on the bytes of `slab`.
//
// Note: [slot storages]
// On the CPU every tensor has a storage of its own, of its own size and not resizable,
// which holds the storage of the slab; an empty tensor holds nothing. Thus saving or
// pickling one tensor writes its bytes alone, and no tensor can grow into its
// neighbour. On other devices the tensors
// share the storage of the slab: torch's device allocators find the block of
// Tensor::record_stream by the data pointer and the deleter of its storage, and ignore
// all other storages.
std::vector<at::Tensor> make_views(const at::Tensor& slab, const SlabPlan& plan);

// All bytes of the slab that holds the storage of a plain tensor, or else of that
// storage itself: a torch.uint8 tensor of one dimension.
at::Tensor memory_of(const at::Tensor& tensor);

}  // namespace pyparallel::ops
