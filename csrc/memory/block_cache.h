// Recycled host memory. Writing to fresh pages costs several times what the copy costs,
// because the kernel clears every page first. A block that is given back here keeps its
// pages for the next batch. Knows POSIX, and no torch.
//
// Note: [idle blocks]
// What is kept is bounded twice: by a number of bytes, oldest blocks go first, and by
// time: a thread that lives only while there are idle blocks unmaps each that was not
// wanted for `max_idle`. In a forked child nothing is kept of what the parent held:
// writing there would copy the parent's pages, and the thread does not exist.
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

// Bytes count whole blocks, which are somewhat larger than what was asked for.
struct CacheInfo {
  int64_t in_use;
  int64_t cached;
  int64_t limit;
  int64_t hits;    // blocks that were taken from the cache
  int64_t misses;  // blocks that were mapped
};

// What may be held on top of what the process uses, unless somebody says otherwise:
// an eighth of the machine's memory, at most 1 GiB.
int64_t default_limit();

// All functions may be called from any thread, and around fork().

// A block of at least nbytes > 0, at a multiple of the page size, of 2 MiB for large
// ones. Its bytes are undefined. std::bad_alloc if there is no memory.
Block take_block(int64_t nbytes);

// Gives back what take_block returned.
void give_block(Block block) noexcept;

// Keeps at most `limit` >= 0 bytes, each block for at most `max_idle` > 0.
void bound_cache(int64_t limit, std::chrono::milliseconds max_idle);

// Unmaps all that is kept; returns how many bytes that was.
int64_t clear_cache();

CacheInfo cache_info();

}  // namespace pyparallel::memory
