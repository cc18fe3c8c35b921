#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/pack.h"
#include "ops/slab_plan.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// Returns true if the bytes of a tensor are all that a copy to a device needs: it is
// plain, on the CPU, without a tangent, and autograd does not record its copy.
bool can_pack(const at::Tensor& tensor);

// The bytes of leaves, in contiguous order, for the slots of a plan.
class LeafBytes {
 public:
  // `op` is the operator in messages. `num` leaves of `device` will be added.
  LeafBytes(const char* op, size_t num, c10::Device device);

  // Adds all leaves of a plan, on `device`. No leaf may overlap `dst`.
  void add(TensorRefs leaves, const SlabPlan& plan, const Snapshot& dst);
  // Adds a leaf that was planned from this tensor, for fresh memory. Returns its bytes,
  // or null if it has none or needs a contiguous copy.
  const uint8_t* add(const at::Tensor& leaf, const PlannedLeaf& planned);

  bool has_strided() const { return !strided_.empty(); }
  // Valid while this lives. Strided leaves have no bytes before read().
  const std::vector<Slot>& slots() const { return slots_; }
  // Returns the slots. Copies strided leaves. Needs no GIL.
  const std::vector<Slot>& read();
  // The cast of each slot, from the dtype of the leaf to the planned one. Empty
  // without casts.
  const std::vector<Cast>& casts() const { return casts_; }

 private:
  const char* op_;
  c10::Device device_;
  const Backend* backend_;
  std::vector<c10::Storage> storages_;  // of contiguous leaves: see Note: [read once]
  std::vector<Snapshot> strided_;       // leaves that need a contiguous copy
  std::vector<size_t> places_;          // the indices in slots_ of strided_
  std::vector<Slot> slots_;
  std::vector<Cast> casts_;
};

// Writes the bytes of the leaves, each in contiguous order, to their planned slots in a
// slab on their device, and zeros elsewhere. The constructor and run(): see PadCopyJob.
class PackJob {
 public:
  PackJob(const at::Tensor& dst, TensorRefs leaves, const SlabPlan& plan);

  int64_t nbytes() const { return dst_.nbytes; }
  // Returns true if run() calls no driver.
  bool on_host() const { return dst_.device.is_cpu(); }
  void run();

 private:
  Snapshot dst_;
  const Backend* backend_;
  std::optional<LeafBytes> leaves_;
};

// Returns a snapshot of a slab. Throws ValueError unless it has the planned bytes.
Snapshot take_slab(const at::Tensor& slab, const Where& where, const SlabPlan& plan);

// Returns contiguous tensors without autograd history on the bytes of `slab`.
//
// Note: [slot storages]
// On the CPU every tensor has a storage of its own size, which is not resizable and
// keeps the storage of the slab alive; an empty tensor does not. So torch.save and
// pickle write the bytes of one tensor alone, and no tensor can grow into its
// neighbour. On other devices the tensors share the storage of the slab: torch's device
// allocators find the block of Tensor::record_stream by the data pointer and the
// deleter of its storage, and ignore all other storages.
std::vector<at::Tensor> make_views(const at::Tensor& slab, const SlabPlan& plan);

// Returns the same for leaves in several blocks: those at the ascending indices of
// `direct` have a block of their own each, after the slab of the others. The blocks are
// fresh memory of a device, and have these places.
std::vector<at::Tensor> make_views(const std::vector<at::Tensor>& blocks,
                                   const std::vector<size_t>& direct,
                                   const std::vector<PlannedLeaf>& leaves);

// Lets every later access to the storage of a tensor raise an error with this text.
void forbid_use(const at::Tensor& tensor, const std::string& message);

// Returns all bytes of the slab of a plain tensor, or of its storage if it has no slab,
// as a torch.uint8 tensor of one dimension.
at::Tensor memory_of(const at::Tensor& tensor);
// Returns the storage of memory_of. The tensor must be plain.
c10::Storage memory_storage(const at::Tensor& tensor);

}  // namespace pyparallel::ops
