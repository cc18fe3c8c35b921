#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ops/pack.h"
#include "ops/slab_plan.h"
#include "ops/snapshot.h"
#include "transfer/engine.h"

namespace pyparallel::ops {

// Returns the current stream of this thread on a device. Calls no device.
c10::Stream current_stream(c10::Device device);

// The Python class of an event behind queued copies; see _C.pyi.
class RecordedEvent {
 public:
  // `sent` has an error but no event if the device accepted no event.
  RecordedEvent(transfer::Engine* engine, c10::DeviceType type,
                transfer::SendResult sent)
      : engine_(engine), type_(type), sent_(std::move(sent)) {}

  bool is_done() const;
  void wait(const c10::Stream& stream) const;
  void synchronize() const;
  void check() const;

 private:
  transfer::Engine* engine_;
  c10::DeviceType type_;
  transfer::SendResult sent_;
};

// The Python class that pins memory and records events for one device type; see _C.pyi.
class Runtime {
 public:
  explicit Runtime(c10::DeviceType type);

  bool observe_copies() const;
  int pin(void* data, int64_t nbytes) const;
  void unpin(void* data) const;
  std::unique_ptr<transfer::Fence> take_copies(const void* data) const;
  std::vector<at::Tensor> allocate(const std::vector<int64_t>& sizes,
                                   const c10::Stream& stream) const;
  // Returns the indices of the tensors that were not allocated here.
  std::vector<size_t> keep(TensorRefs tensors, const c10::Stream& stream) const;
  int64_t create_stream(int64_t device) const;
  int exchange_capture_mode(int mode, int64_t device) const;
  bool is_capturing(const c10::Stream& stream) const;
  bool is_idle(const c10::Stream& stream) const;
  int refused_batch() const { return runtime_->refused_batch(); }
  // Throws if `stream`, which the message names, is under capture.
  void check_not_capturing(const c10::Stream& stream, const char* name) const;
  std::unique_ptr<transfer::CallScope> scope(const c10::Stream& stream) const {
    return runtime_->scope(stream.device_index());
  }
  // Throws in a process that was forked after the first call.
  void check_usable() const;
  // Returns true if copies on `stream` can read this memory of the host in place.
  bool is_pinned(const void* data, const c10::Stream& stream) const {
    return runtime_->is_pinned(data, stream.device_index());
  }
  RecordedEvent record(const c10::Stream& stream) const;
  // Queues the copies of a job on `stream`; see Engine::send.
  RecordedEvent send(transfer::Job job, const c10::Stream& stream) const;
  std::unique_ptr<transfer::Fence> fence() const;
  transfer::Engine* engine() const;

 private:
  c10::DeviceType type_;
  transfer::Runtime* runtime_;
};

// Copies packed leaves, and tensors that are read in place, to one device. The
// constructor needs the GIL; run() does not.
class SendJob {
 public:
  SendJob(c10::Stream stream, int64_t chunk);

  void pack(const at::Tensor& slab, TensorRefs leaves, const SlabPlan& plan);
  void read_in_place(TensorRefs targets, TensorRefs sources);

  RecordedEvent run();

 private:
  c10::Stream stream_;
  int64_t chunk_;
  transfer::Engine* engine_;
  Snapshot slab_;
  std::optional<LeafBytes> leaves_;
  std::vector<Snapshot> snapshots_;  // of direct_: see Note: [read once]
  std::vector<transfer::Copy> direct_;
};

// The Python class of a copy of leaves to the host; see prepare_return in _C.pyi.
class ReturnJob {
 public:
  // Needs the GIL. There is a leaf, and all leaves are plain and on one device.
  explicit ReturnJob(TensorRefs leaves);

  const SlabPlan& plan() const { return plan_; }
  // Returns true if the current stream is under capture. Needs no GIL.
  bool is_capturing() const { return runtime_.is_capturing(home_); }
  // Returns memory of torch's host allocator for the result. Needs no GIL.
  at::Tensor pinned(int64_t nbytes) const;
  // Sets the memory of the result. Needs the GIL.
  void take_host(const at::Tensor& host);
  // Packs the leaves on the current stream, and queues the copy on `other`, or behind
  // the packing. Needs no GIL. Call finish() with the GIL afterwards. The result is as
  // that of Engine::send.
  RecordedEvent run(const std::optional<c10::Stream>& other);
  void finish() {
    leaves_.reset();
    host_.reset();
  }

 private:
  void queue(const c10::Stream& stream);

  c10::Stream home_;
  Runtime runtime_;
  transfer::Engine* engine_;
  SlabPlan plan_;
  // Until finish().
  std::optional<LeafBytes> leaves_;
  at::Tensor host_;
};

// The staging blocks of all engines; see _C.pyi.
struct PinnedInfo {
  int64_t in_use;
  int64_t cached;
  int64_t limit;
  int64_t waits;
};
PinnedInfo pinned_info();

// Sets the limit of each engine, also of later ones; transfer::kLargestBlock or more.
void bound_pinned(int64_t limit);

// Returns the possible targets of a SendJob in the order of registered_devices().
std::vector<c10::DeviceType> transfers();

}  // namespace pyparallel::ops
