#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ops/pack.h"
#include "ops/slab_plan.h"
#include "ops/snapshot.h"
#include "ops/transfer.h"

namespace pyparallel::ops {

// Which pinned memory a BatchCopy reads in place; see plan_copy in _C.pyi.
struct InPlace {
  int64_t leaf_nbytes;
  int64_t mean_nbytes;
};

// The Python class of the copy of one batch to one device; see _C.pyi.
//
// Note: [one pass]
// The tensors of a batch were made some time ago, so each is a cache miss or more. One
// loop reads them all, and asks for the memory of later ones ahead. All else works on
// the list that it makes.
class BatchCopy {
 public:
  // Needs the GIL. Leaves of floating-point numbers are cast to `dtype`, except those
  // that the device reads in place. Returns null unless all leaves can_pack and can be
  // cast.
  static std::unique_ptr<BatchCopy> plan(TensorRefs leaves, c10::Stream stream,
                                         InPlace limits,
                                         std::optional<c10::ScalarType> dtype);

  // The memory that start() may read in place.
  const std::vector<c10::Storage>& sources() const { return sources_; }
  // Queues the copy, once and without the GIL. With `waits_here` the current stream
  // will wait at once, and the copy may use it instead of its own if `may_go_home`.
  // Call finish() with the GIL afterwards.
  void start(bool waits_here, bool may_go_home);
  // Drops the leaves. Throws the error that stopped the copy half way, if one did.
  void finish();
  // Returns the tensors, for which the current stream waits. Needs no GIL.
  std::vector<at::Tensor> wait() const;

  bool is_started() const { return event_.has_value(); }
  // The number of copies that read `sources`.
  size_t num_in_place() const { return span_.is_used ? 1 : direct_.size(); }
  // The event behind these; null without such copies.
  const RecordedEvent* reading() const;
  // The bytes that are packed only because they are not pinned.
  int64_t pageable_nbytes() const { return pageable_nbytes_; }

 private:
  // Memory in which all leaves have places of a slab.
  struct Span {
    const uint8_t* begin = nullptr;
    int64_t nbytes = 0;  // to the end of the last leaf
    std::vector<int64_t> offsets;
    bool is_used = false;
  };

  // The slots of the slab, and their casts, if there are any.
  struct Packed {
    std::vector<Slot> slots;
    std::vector<Cast> casts;
  };

  BatchCopy(c10::Stream stream, size_t num, std::optional<c10::ScalarType> dtype);

  bool add(TensorRefs leaves);
  void find_sources(TensorRefs leaves, InPlace limits);
  bool find_span(TensorRefs leaves);
  void choose_sources();
  void choose_stream(bool waits_here, bool may_go_home);
  void keep_dtype(size_t index);
  Packed take_direct();

  c10::Stream stream_;
  Runtime runtime_;
  std::optional<c10::ScalarType> dtype_;
  std::vector<c10::ScalarType> given_;  // dtypes of the leaves, if they may be cast
  std::vector<PlannedLeaf> leaves_;
  int64_t nbytes_ = 0;                 // of the slab, without direct leaves
  std::optional<LeafBytes> bytes_;     // until finish()
  std::vector<c10::Storage> sources_;  // until finish()
  Span span_;
  std::vector<size_t> direct_;  // leaves with memory of their own, ascending
  int64_t pageable_nbytes_ = 0;
  std::vector<at::Tensor> blocks_;  // the slab, and those of direct_
  std::optional<RecordedEvent> event_;
};

}  // namespace pyparallel::ops
