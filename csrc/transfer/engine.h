// Sends batches to a device: packs leaves into staging blocks, queues copies, marks the
// place behind them. The host waits for the device only when blocks would take more
// memory than they may (Note: [staging limit]). Knows no torch.
//
// Note: [order of a transfer]
// The destination was allocated on the home stream, and whoever used that memory before
// had queued it there. So a mark is recorded on home, after the allocation, and the
// copy stream waits for it before its first copy. Copies that read in place come first:
// the device works on them while leaves are packed. Then follow the slab's chunks, each
// with a mark of its own behind it, so that its block can be used again while later
// chunks of the same batch are packed. The last mark is that of the whole transfer.
#pragma once

#include <cstdint>
#include <exception>

#include "core/slots.h"
#include "transfer/events.h"
#include "transfer/runtime.h"
#include "transfer/staging.h"

namespace pyparallel::transfer {

// So many copies and more of one transfer are queued by one call.
constexpr int64_t kBatchCopies = 8;

struct Job {
  // What is packed: `nbytes` of device memory, and the leaves, as Pack has them.
  uint8_t* dst;
  int64_t nbytes;
  const Slot* slots;
  int64_t num_slots;
  // What the device reads in place, from page-locked memory: the caller keeps it until
  // the mark has been reached. Disjoint from dst, and of more than 0 bytes.
  const Copy* direct;
  int64_t num_direct;
  // Home and copies are of one device; they may be the same.
  Stream home;
  Stream copies;
  // Bytes of a chunk, in [1, kLargestBlock].
  int64_t chunk = kLargestBlock;
};

// `mark` stands behind all that was queued, also if an error stopped it half way. It is
// null if the device took no mark: then nobody knows when it has read its sources.
struct Sent {
  MarkRef mark;
  std::exception_ptr error;
};

// For all devices of one runtime. Must not be destroyed before its last mark.
class Engine {
 public:
  // Writes all bytes of a slab; chooses body.piece itself.
  using PackBytes = void (*)(const Pack& body);

  Engine(Runtime* runtime, PackBytes pack, Limits limits = {});

  // Throws only if nothing was queued but a wait. The leaves may change when this
  // returns.
  Sent send(const Job& job);

  bool is_done(const Mark& mark) const;
  void wait(const Stream& stream, const Mark& mark) const;

  // As Staging::set_limit. Does nothing in a forked process, where locks may be held by
  // threads that do not exist.
  void set_limit(int64_t max_bytes);

  const Events& events() const { return events_; }
  const Staging& staging() const { return staging_; }

 private:
  void check_usable() const;
  void check_not_capturing(const Stream& stream, const char* name) const;
  void copy_direct(const Job& job);
  MarkRef copy_packed(const Job& job);
  MarkRef queue(const Block& block, const Copy& copy);

  Runtime* runtime_;
  PackBytes pack_;
  Events events_;
  Staging staging_;
};

}  // namespace pyparallel::transfer
