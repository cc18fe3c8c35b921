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
//
// Note: [copies on the home stream]
// A copy stream costs two events and two waits, 5 to 10 us on the device. That is worth
// it where home computes meanwhile. Copies go on home itself if all of these hold:
// - Home is idle, and the caller makes it wait for the copies at once. So nothing could
//   run there beside the copies.
// - Nothing is packed. Blocks that few streams read are used again sooner.
// - There are fewer than kBatchCopies copies. The legacy default stream, which most
//   often is home, takes no batch of copies.
// The stream's own order takes the place of the events: the memory was allocated on
// home, and is used and freed there. Another thread may queue work on home between the
// question and the copies. The copies then run behind it, and the order stays right.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "core/pack.h"
#include "transfer/events.h"
#include "transfer/fence.h"
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
  // The caller makes home wait for the copies as soon as they are queued: see
  // Note: [copies on the home stream].
  bool lands_at_once = false;
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
  Sent send(Job job);

  // Marks all that is queued on `stream` now. It must not be under capture.
  MarkRef record(const Stream& stream);
  // For all current streams of this thread, which may be under capture.
  std::unique_ptr<Fence> fence();

  bool is_done(const Mark& mark) const;
  // Throws if `stream` is under capture, which a wait would end.
  void wait(const Stream& stream, const Mark& mark) const;
  void wait_on_host(const Mark& mark) const;

  // As Staging::set_limit. Does nothing in a forked process, where locks may be held by
  // threads that do not exist.
  void set_limit(int64_t max_bytes);

  const Events& events() const { return events_; }
  const Staging& staging() const { return staging_; }

 private:
  void check_not_capturing(const Stream& stream, const char* name) const;
  bool copies_at_home(const Job& job) const;
  void copy_direct(const Job& job);
  MarkRef copy_packed(const Job& job);
  MarkRef queue(const Block& block, const Copy& copy);

  Runtime* runtime_;
  PackBytes pack_;
  Events events_;
  Staging staging_;
};

}  // namespace pyparallel::transfer
