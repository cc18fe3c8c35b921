// Recycled host memory. A write to fresh pages takes several times as long as the copy,
// because the kernel clears every page first. A block in this cache keeps its pages for
// the next batch. Uses POSIX, but no torch.
//
// Note: [idle blocks]
// The cache has two bounds. One is a number of bytes: above it the oldest blocks are
// unmapped. The other is an idle time: a thread, which runs only while there are idle
// blocks, unmaps each block after `max_idle`. A forked child keeps none of the parent's
// idle blocks: a write there would copy the pages, and the thread does not exist.
//
// With PYPARALLEL_DEBUG=1 or =poison a block is overwritten with 0xDB as soon as it is
// given back.
#pragma once

#include <chrono>
#include <cstdint>

namespace pyparallel::memory {

struct Block {
  void* data;
  int64_t capacity;  // bytes
};

// Bytes of whole blocks, which are somewhat larger than the requests.
struct CacheInfo {
  int64_t in_use;
  int64_t cached;
  int64_t limit;
  int64_t hits;    // blocks taken from the cache
  int64_t misses;  // blocks mapped
};

// Returns the default limit of cached bytes: an eighth of the memory of the machine, at
// most 1 GiB.
int64_t default_limit();

// All functions are thread-safe, and safe around fork().

// Returns a block of at least nbytes > 0 with undefined bytes, aligned to the page
// size; large blocks are aligned to 2 MiB. Throws std::bad_alloc if there is no memory.
Block take_block(int64_t nbytes);

// Gives back a block of take_block.
void give_block(Block block) noexcept;

// Keeps at most `limit` >= 0 bytes, each block for at most `max_idle` > 0.
void bound_cache(int64_t limit, std::chrono::milliseconds max_idle);

// Unmaps all cached blocks and returns their bytes.
int64_t clear_cache();

CacheInfo cache_info();

}  // namespace pyparallel::memory
