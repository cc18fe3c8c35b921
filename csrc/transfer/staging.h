// Staging blocks: pinned memory into which leaves are packed for a copy to a device.
//
// Note: [staging lifetime]
// A block is in one state at a time. `take` gives it to one thread, which writes it. As
// soon as a copy from it may have been queued, the block enters the queue of its
// stream, with an event behind that copy, and is not written. A block leaves the front
// of its queue only after its own event. Then it is idle, and `take` may return it
// again. If no event could be recorded behind the copy, the block is abandoned and
// never reused, because the end of the copy is unknown. No lock is held during calls to
// the device, because a driver may block in any call.
//
// Note: [staging limit]
// All existing blocks, abandoned ones too, count against one limit. Below the limit no
// thread waits: if no block is idle, a new one is allocated. At the limit, idle blocks
// of other sizes are freed first. Then the host waits for the front of the stream's own
// queue. If all blocks of the stream are still being written, it waits for the writing
// threads. Both waits end: a writing thread takes no second block, and the work before
// an event was queued earlier.
//
// No thread waits for another stream. That stream may be blocked until the waiting
// thread queues its own part (an all-reduce between devices whose ranks are threads).
// So a stream without blocks gets one even beyond the limit, and blocks beyond the
// limit are freed as soon as they are read. With n streams there are at most `limit` +
// (n - 1) * kLargestBlock bytes. Blocks in transit between a queue, the idle list and
// the runtime are counted. They distinguish "used by other streams" from "idle soon".
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "transfer/events.h"
#include "transfer/runtime.h"

namespace pyparallel::transfer {

// The sizes of blocks are these and the powers of two between them.
constexpr int64_t kSmallestBlock = 64 << 10;
constexpr int64_t kLargestBlock = 4 << 20;
constexpr size_t kNumBlockSizes = 7;

struct Block {
  Pinned memory{};
  size_t size_class = 0;
  Stream stream{};  // its copies read the block

  uint8_t* data() const { return memory.data; }
  int64_t nbytes() const { return kSmallestBlock << size_class; }
};

struct Limits {
  int64_t max_idle = 64 << 20;  // bytes of idle blocks
  bool poison = false;
  int64_t max_bytes = int64_t{1} << 30;  // of all blocks; see Note: [staging limit]
};

// The events must outlive it.
class Staging {
 public:
  // With limits.poison, a block is overwritten with kPoison when its copy is known to
  // be done.
  Staging(Runtime* runtime, Limits limits);

  // Returns an idle block of at least nbytes, in [1, kLargestBlock], for copies on
  // `stream`. Waits at the limit. The caller gives or abandons the block before it
  // takes another one.
  Block take(int64_t nbytes, const Stream& stream);

  // Gives back a block that is read by copies before `event` on its stream. If this
  // throws, the caller still owns the block.
  void give(const Block& block, EventRef event);

  // Gives back a block that no copy reads.
  void give(const Block& block) noexcept;

  // Withdraws a block, because copies may read it for ever.
  void abandon(const Block& block) noexcept;

  // Sets limits.max_bytes. Idle blocks above it are freed now, other blocks after their
  // copies.
  void set_limit(int64_t max_bytes);

  struct Info {
    int64_t num_allocated;  // blocks, since the beginning
    int64_t num_freed;
    int64_t num_idle;
    int64_t num_read;          // by copies that may still run
    int64_t nbytes;            // of all blocks that exist
    int64_t idle_nbytes;       // of the idle ones among them
    int64_t abandoned_nbytes;  // of the abandoned ones among them
    int64_t num_waits;         // how often the host had to wait
  };
  Info info() const;

  static constexpr int kPoison = 0xDB;

 private:
  struct Reading {
    Block block;
    EventRef event;
  };
  struct StreamQueue {
    Stream stream;
    std::deque<Reading> reading;
    int64_t num_written = 0;  // blocks that threads have taken
  };

  bool take_idle(Block* block);
  bool reserve(const Block& block);
  bool may_allocate(const StreamQueue& queue, int64_t nbytes) const;
  bool evict(std::unique_lock<std::mutex>* lock) noexcept;
  void collect();
  void collect(const Stream& stream);
  EventRef front(const Stream& stream) const;
  bool pop(const Stream& stream, const EventRef& event, Block* block);
  void keep(const Block& block, int64_t* counter) noexcept;
  void free(const Block& block, int64_t* counter) noexcept;
  StreamQueue* find_queue(const Stream& stream);
  StreamQueue* queue_of(const Stream& stream);

  Runtime* runtime_;
  int64_t max_idle_;
  bool poison_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t limit_;
  std::array<std::vector<Block>, kNumBlockSizes> idle_;
  std::deque<StreamQueue> queues_;  // one for each stream; addresses are stable
  int64_t nbytes_ = 0;              // of all blocks, also those being allocated
  int64_t idle_nbytes_ = 0;
  int64_t abandoned_nbytes_ = 0;
  int64_t num_in_transit_ = 0;  // blocks between two states, or being freed
  int64_t num_allocated_ = 0;
  int64_t num_freed_ = 0;
  int64_t num_waits_ = 0;
};

}  // namespace pyparallel::transfer
