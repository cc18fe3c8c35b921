// Page-locked blocks that leaves are packed into, on their way to a device.
//
// Note: [staging lifetime]
// A block is in one place at a time. `take` gives it to one thread, which writes it. As
// soon as a copy from it may have been queued it goes, with a mark behind that copy, to
// the end of its stream's line, and nobody writes it. Blocks leave a line at its front
// and only when their own mark has been reached: then they are idle, and free to take.
// A block whose copy could not be marked is lost, never used again: nobody knows when
// it has been read. Device calls are made without the lock, because a driver may block
// in any of them.
//
// Note: [staging limit]
// All blocks that exist, lost ones too, count against one limit. Below it nobody waits:
// if none is idle, a new one is allocated. At it, idle blocks of other sizes are freed
// first. Then the host waits for the front of the stream's own line, or, if all that
// the stream has is still being written, for the threads that write. Neither can last:
// whoever writes takes no second block, and what a mark stands behind was queued
// before.
//
// Nobody ever waits for another stream. That one may stand still until the very thread
// that would wait here has queued its part (an all-reduce between devices whose ranks
// are threads). So a stream that has no block at all gets one, even beyond the limit,
// and blocks beyond it are freed as soon as they are read: with n streams there are at
// most `limit` + (n - 1) * kLargestBlock bytes. To tell "taken by other streams" from
// "about to be idle", blocks between a line, the idle ones and the runtime are counted.
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

// Blocks have these sizes and the powers of two between them.
constexpr int64_t kSmallestBlock = 64 << 10;
constexpr int64_t kLargestBlock = 4 << 20;
constexpr size_t kNumBlockSizes = 7;

struct Block {
  Pinned memory{};
  size_t size_class = 0;
  Stream stream{};  // whose copies read it

  uint8_t* data() const { return memory.data; }
  int64_t nbytes() const { return kSmallestBlock << size_class; }
};

struct Limits {
  int64_t max_idle = 64 << 20;  // bytes of idle blocks
  bool poison = false;
  int64_t max_bytes = int64_t{1} << 30;  // of all blocks; see Note: [staging limit]
};

// Outlived by the events of its marks.
class Staging {
 public:
  // With `poison`, blocks are overwritten with kPoison as soon as they are known to
  // have been read.
  Staging(Runtime* runtime, Limits limits);

  // A block of at least nbytes, in [1, kLargestBlock], that nothing reads, for copies
  // on `stream`. Waits at the limit. The caller gives it back, or loses it, before it
  // takes another one.
  Block take(int64_t nbytes, const Stream& stream);

  // Gives back a block that copies before `mark`, on its stream, read. If this throws,
  // the caller still has it.
  void give(const Block& block, MarkRef mark);

  // Gives back a block that nothing reads.
  void give(const Block& block) noexcept;

  // Gives up a block that may be read for ever.
  void lose(const Block& block) noexcept;

  // Sets limits.max_bytes. Idle blocks above it are freed now, others when they have
  // been read.
  void set_limit(int64_t max_bytes);

  struct Info {
    int64_t num_allocated;  // blocks, since the beginning
    int64_t num_freed;
    int64_t num_idle;
    int64_t num_read;     // by copies that are not known to be done
    int64_t nbytes;       // of all blocks that exist
    int64_t idle_nbytes;  // of the idle ones among them
    int64_t lost_nbytes;  // of the lost ones among them
    int64_t num_waits;    // how often the host had to wait
  };
  Info info() const;

  static constexpr int kPoison = 0xDB;

 private:
  struct Reading {
    Block block;
    MarkRef mark;
  };
  struct Line {
    Stream stream;
    std::deque<Reading> reading;
    int64_t num_written = 0;  // blocks that threads have taken
  };

  bool take_idle(Block* block);
  bool reserve(const Block& block);
  bool may_allocate(const Line& line, int64_t nbytes) const;
  bool evict(std::unique_lock<std::mutex>* lock) noexcept;
  void collect();
  void collect(const Stream& stream);
  MarkRef front(const Stream& stream) const;
  bool pop(const Stream& stream, const MarkRef& mark, Block* block);
  void keep(const Block& block, int64_t* holder) noexcept;
  void free(const Block& block, int64_t* holder) noexcept;
  Line* find(const Stream& stream);
  Line* line_of(const Stream& stream);

  Runtime* runtime_;
  int64_t max_idle_;
  bool poison_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t limit_;
  std::array<std::vector<Block>, kNumBlockSizes> idle_;
  std::deque<Line> lines_;  // one for each stream; they never move
  int64_t nbytes_ = 0;      // of all blocks, from before they are allocated
  int64_t idle_nbytes_ = 0;
  int64_t lost_nbytes_ = 0;
  int64_t num_moving_ = 0;  // blocks that have been read, or are being freed
  int64_t num_allocated_ = 0;
  int64_t num_freed_ = 0;
  int64_t num_waits_ = 0;
};

}  // namespace pyparallel::transfer
