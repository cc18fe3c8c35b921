// The engine copies batches to a device: it packs leaves into staging blocks, queues
// the copies and records events behind them. The host waits for the device only at the
// limit of the staging memory (Note: [staging limit]). This folder does not use torch.
//
// Note: [order of a transfer]
// The destination belongs to the stream of the copies (Note: [device memory] in
// loans.h), so they wait for no other stream. Copies that read pinned sources in place
// come first: the device runs them while the host packs leaves. The chunks of the slab
// follow. Each has an event behind it, so that its block can be reused while later
// chunks of the same batch are packed. The last event covers the whole transfer.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "core/pack.h"
#include "transfer/events.h"
#include "transfer/fence.h"
#include "transfer/foreign_copies.h"
#include "transfer/loans.h"
#include "transfer/runtime.h"
#include "transfer/staging.h"

namespace pyparallel::transfer {

// From this number on, the copies of one transfer are queued by one call.
constexpr int64_t kBatchCopies = 8;

struct Job {
  // The packed part: `nbytes` of device memory, and the leaves as slots of Pack.
  uint8_t* dst;
  int64_t nbytes;
  const Slot* slots;
  int64_t num_slots;
  // As in Pack. With casts, an item size of the slab divides `chunk`.
  const Cast* casts;
  // Copies that the device reads in place, from pinned memory. The caller keeps the
  // sources alive until the event is done. Each has bytes, and is disjoint from dst.
  const Copy* direct;
  int64_t num_direct;
  // Of the copies. The destinations belong to it.
  Stream stream;
  // Bytes of a chunk, in [1, kLargestBlock].
  int64_t chunk = kLargestBlock;
  // The caller has called check_not_capturing() for the stream.
  bool is_checked = false;
};

// `event` covers all queued copies, also if an error stopped the transfer half way. It
// is null if the device accepted no event. Then the end of the copies is unknown.
struct SendResult {
  EventRef event;
  std::exception_ptr error;
};

// Serves all devices of one runtime. Must outlive its events.
class Engine {
 public:
  // Writes all bytes of a slab. Sets body.piece.
  using PackBytes = void (*)(const Pack& body);

  Engine(Runtime* runtime, PackBytes pack, Limits limits = {});

  // Throws only if no copy was queued. The leaves may change when this returns.
  SendResult send(const Job& job);

  // Throws if `stream`, which the message names, is under capture.
  void check_not_capturing(const Stream& stream, const char* name) const;

  // Records an event on `stream`, which must not be under capture.
  EventRef record(const Stream& stream);
  // Returns a fence on all current streams of this thread. They may be under capture.
  std::unique_ptr<Fence> fence();

  // As the functions of the runtime. The copies of other code from this memory are
  // tracked after observe_copies() has returned true.
  bool observe_copies() { return runtime_->observe_copies(&foreign_); }
  int pin(void* data, int64_t nbytes);
  void unpin(void* data);
  // See ForeignCopies::take.
  std::unique_ptr<Fence> take_copies(const void* data) { return foreign_.take(data); }

  bool is_done(const RecordedEvent& event) const;
  // Throws if `stream` is under capture, because a wait would end the capture.
  void wait(const Stream& stream, const RecordedEvent& event) const;
  void wait_on_host(const RecordedEvent& event) const;

  // As Staging::set_limit. Does nothing in a forked process: a thread of the parent may
  // have held the lock at the fork.
  void set_limit(int64_t max_bytes);

  Loans& loans() { return loans_; }
  const Events& events() const { return events_; }
  const Staging& staging() const { return staging_; }

 private:
  void copy_direct(const Job& job);
  EventRef copy_packed(const Job& job);
  EventRef queue(const Block& block, const Copy& copy);

  Runtime* runtime_;
  PackBytes pack_;
  Events events_;
  Staging staging_;
  ForeignCopies foreign_;
  Loans loans_;
};

}  // namespace pyparallel::transfer
