// Page-locked blocks that leaves are packed into, on their way to a device.
//
// Note: [staging lifetime]
// A block is in one place at a time. `take` gives it to one thread, which writes it. As
// soon as a copy from it may have been queued it goes, with a mark behind that copy, to
// the end of its stream's line, and nobody writes it. Blocks leave a line at its front
// and only when their own mark has been reached: then they are idle, and free to take.
// A block whose copy could not be marked is never used again: nobody knows when it has
// been read. The host waits for nothing: if none is idle, a new one is allocated.
// Device calls are made without the lock, because a driver may block in any of them.
#pragma once

#include <array>
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

  uint8_t* data() const { return memory.data; }
  int64_t nbytes() const { return kSmallestBlock << size_class; }
};

// Outlived by the events of its marks.
class Staging {
 public:
  // Keeps at most `max_idle` idle bytes. With `poison`, blocks are overwritten with
  // kPoison as soon as they are known to have been read.
  Staging(Runtime* runtime, int64_t max_idle, bool poison);

  // A block of at least nbytes, in [1, kLargestBlock], that nothing reads.
  Block take(int64_t nbytes);

  // Gives back a block that copies before `mark`, on `stream`, read.
  void give(const Block& block, const Stream& stream, MarkRef mark);

  // Gives back a block that nothing reads.
  void give(const Block& block) noexcept;

  struct Info {
    int64_t num_allocated;  // blocks, since the beginning
    int64_t num_freed;
    int64_t num_idle;
    int64_t num_read;  // by copies that are not known to be done
  };
  Info info() const;

  static constexpr int kPoison = 0xDB;

 private:
  struct Reading {
    Block block;
    MarkRef mark;
  };
  using Line = std::deque<Reading>;

  bool take_idle(size_t size_class, Block* block);
  void collect();
  void collect(const Stream& stream);
  MarkRef front(const Stream& stream) const;
  bool pop(const Stream& stream, const MarkRef& mark, Block* block);
  Line* find(const Stream& stream);

  Runtime* runtime_;
  int64_t max_idle_;
  bool poison_;
  mutable std::mutex mutex_;
  std::array<std::vector<Block>, kNumBlockSizes> idle_;
  std::vector<std::pair<Stream, Line>> lines_;
  int64_t idle_nbytes_ = 0;
  int64_t num_allocated_ = 0;
  int64_t num_freed_ = 0;
};

}  // namespace pyparallel::transfer
