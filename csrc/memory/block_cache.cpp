#include "memory/block_cache.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace pyparallel::memory {
namespace {

using Clock = std::chrono::steady_clock;
using Blocks = std::vector<Block>;

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kSmallUnit = 64 << 10;
constexpr int64_t kDefaultLimit = int64_t{1} << 30;
constexpr std::chrono::milliseconds kDefaultMaxIdle{10'000};
constexpr int kPoison = 0xDB;

struct Idle {
  Block block;
  Clock::time_point since;
};

// Idle blocks are in the order in which they were given back.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Idle> idle;
  CacheInfo info{};
  Clock::duration max_idle = kDefaultMaxIdle;
  bool reaping = false;
};

// Never destroyed: tensors may be freed after static objects are.
State* state = nullptr;

void unmap(const Block& block) {
  munmap(block.data, static_cast<size_t>(block.capacity));
}

void unmap(const Blocks& blocks) {
  for (const Block& block : blocks) unmap(block);
}

void before_fork() { state->mutex.lock(); }

void after_fork_in_parent() { state->mutex.unlock(); }

// The child gets a new mutex and a new condition variable, because the old ones may
// have waiters that exist in the parent only.
void after_fork_in_child() {
  State* const parent = state;
  state = new State;
  state->info = parent->info;
  state->info.cached = 0;
  state->max_idle = parent->max_idle;
  for (const Idle& idle : parent->idle) unmap(idle.block);
}

State& shared_state() {
  static const bool ready = [] {
    state = new State;
    state->info.limit = default_limit();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return true;
  }();
  static_cast<void>(ready);
  return *state;
}

int64_t capacity_for(int64_t nbytes) {
  const int64_t unit = nbytes < kHugePage ? kSmallUnit : kHugePage;
  if (nbytes > INT64_MAX - 2 * unit) throw std::bad_alloc();
  return (nbytes + unit - 1) / unit * unit;
}

// Returns true if freed blocks are overwritten. transfer/debug.py reads the same
// variable.
bool poison_enabled() {
  static const bool asked = [] {
    const char* const value = std::getenv("PYPARALLEL_DEBUG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return asked;
}

// Maps fresh memory; returns null without memory. Large blocks are aligned to huge
// pages and request them, so that one page fault serves 2 MiB.
void* map(int64_t capacity) {
  const bool huge = capacity >= kHugePage;
  const int64_t length = huge ? capacity + kHugePage : capacity;
  void* const found = mmap(nullptr, static_cast<size_t>(length), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  if (!huge) return found;
  auto* const first = static_cast<char*>(found);
  const auto over = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) %
                                         static_cast<uintptr_t>(kHugePage));
  const int64_t skipped = over == 0 ? 0 : kHugePage - over;
  char* const data = first + skipped;
  if (skipped > 0) munmap(first, static_cast<size_t>(skipped));
  if (skipped < kHugePage) {
    munmap(data + capacity, static_cast<size_t>(kHugePage - skipped));
  }
#ifdef MADV_HUGEPAGE
  madvise(data, static_cast<size_t>(capacity), MADV_HUGEPAGE);
#endif
  return data;
}

// Takes the smallest idle block that fits, unless more than half of it would be unused.
bool take_idle(State& cache, int64_t capacity, Block* block) {
  auto best = cache.idle.end();
  for (auto it = cache.idle.begin(); it != cache.idle.end(); ++it) {
    const int64_t have = it->block.capacity;
    if (have < capacity || have / 2 > capacity) continue;
    if (best == cache.idle.end() || have < best->block.capacity) best = it;
  }
  if (best == cache.idle.end()) return false;
  *block = best->block;
  cache.idle.erase(best);
  cache.info.cached -= block->capacity;
  return true;
}

// Moves the oldest blocks to `taken` until at most `limit` bytes are left. `taken` must
// have reserved room for all of them, so that this cannot fail half way.
void take_above(State& cache, int64_t limit, Blocks* taken) {
  size_t num = 0;
  while (cache.info.cached > limit) {
    const Block& block = cache.idle[num++].block;
    taken->push_back(block);
    cache.info.cached -= block.capacity;
  }
  cache.idle.erase(cache.idle.begin(),
                   cache.idle.begin() + static_cast<std::ptrdiff_t>(num));
}

Blocks take_above(State& cache, int64_t limit) {
  Blocks taken;
  taken.reserve(cache.idle.size());
  take_above(cache, limit, &taken);
  return taken;
}

// The thread that unmaps blocks after their idle time. It ends with the last block.
void reap(State* cache) {
  std::unique_lock<std::mutex> lock(cache->mutex);
  while (!cache->idle.empty()) {
    const Idle oldest = cache->idle.front();
    const Clock::time_point due = oldest.since + cache->max_idle;
    if (Clock::now() < due) {
      cache->changed.wait_until(lock, due);
      continue;
    }
    cache->idle.erase(cache->idle.begin());
    cache->info.cached -= oldest.block.capacity;
    lock.unlock();
    unmap(oldest.block);
    lock.lock();
  }
  cache->reaping = false;
}

// Called with the mutex held. The thread blocks all signals, so that the threads of the
// program handle them.
void start_reaping(State* cache) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(reap, cache).detach();
    cache->reaping = true;
  } catch (const std::exception&) {  // without memory, or without another thread
    cache->reaping = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Makes a block idle. Returns the blocks that must be unmapped.
Blocks keep(State& cache, Block block) {
  const std::lock_guard<std::mutex> lock(cache.mutex);
  cache.info.in_use -= block.capacity;
  if (block.capacity > cache.info.limit) return {block};
  Blocks above;
  above.reserve(cache.idle.size() + 1);
  cache.idle.push_back({block, Clock::now()});
  cache.info.cached += block.capacity;
  if (!cache.reaping) start_reaping(&cache);
  take_above(cache, cache.reaping ? cache.info.limit : 0, &above);
  return above;
}

}  // namespace

int64_t default_limit() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  const int64_t eighth = pages > 0 ? pages / 8 * sysconf(_SC_PAGESIZE) : kDefaultLimit;
  return eighth < kDefaultLimit ? eighth : kDefaultLimit;
}

Block take_block(int64_t nbytes) {
  State& cache = shared_state();
  Block block{nullptr, capacity_for(nbytes)};
  {
    const std::lock_guard<std::mutex> lock(cache.mutex);
    if (take_idle(cache, block.capacity, &block)) {
      ++cache.info.hits;
      cache.info.in_use += block.capacity;
      return block;
    }
  }
  block.data = map(block.capacity);
  if (block.data == nullptr && clear_cache() > 0) block.data = map(block.capacity);
  if (block.data == nullptr) throw std::bad_alloc();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  ++cache.info.misses;
  cache.info.in_use += block.capacity;
  return block;
}

void give_block(Block block) noexcept {
  if (poison_enabled())
    std::memset(block.data, kPoison, static_cast<size_t>(block.capacity));
  try {
    unmap(keep(shared_state(), block));
  } catch (const std::bad_alloc&) {
    unmap(block);
  }
}

void bound_cache(int64_t limit, std::chrono::milliseconds max_idle) {
  State& cache = shared_state();
  Blocks above;
  {
    const std::lock_guard<std::mutex> lock(cache.mutex);
    cache.info.limit = limit;
    cache.max_idle = max_idle;
    above = take_above(cache, limit);
    cache.changed.notify_all();
  }
  unmap(above);
}

int64_t clear_cache() {
  State& cache = shared_state();
  Blocks all;
  {
    const std::lock_guard<std::mutex> lock(cache.mutex);
    all = take_above(cache, 0);
    cache.changed.notify_all();
  }
  unmap(all);
  int64_t nbytes = 0;
  for (const Block& block : all) nbytes += block.capacity;
  return nbytes;
}

CacheInfo cache_info() {
  State& cache = shared_state();
  const std::lock_guard<std::mutex> lock(cache.mutex);
  return cache.info;
}

}  // namespace pyparallel::memory
