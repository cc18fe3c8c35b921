// Recycled blocks: bounds, idle time, threads, fork; fuzz_block_cache.cpp has a model.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "memory/block_cache.h"

namespace {

// The allocations of this thread that still succeed; negative for all.
thread_local int num_allowed = -1;

}  // namespace

void* operator new(size_t nbytes) {
  void* const data = num_allowed == 0 ? nullptr : std::malloc(nbytes == 0 ? 1 : nbytes);
  if (data == nullptr) throw std::bad_alloc();
  if (num_allowed > 0) --num_allowed;
  return data;
}

void operator delete(void* data) noexcept { std::free(data); }

void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace {

using namespace pyparallel::memory;
using std::chrono::milliseconds;

constexpr int64_t kMiB = 1 << 20;
constexpr milliseconds kLong{600'000};

void start_anew(int64_t limit, milliseconds patience) {
  clear_cache();
  bound_cache(limit, patience);
  CHECK(cache_info().cached == 0);
  CHECK(cache_info().in_use == 0);
  CHECK(cache_info().limit == limit);
}

void check_empty_in_time() {
  for (int i = 0; i < 200 && cache_info().cached > 0; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  CHECK(cache_info().cached == 0);
}

void write(const Block& block, int value) {
  memset(block.data, value, static_cast<size_t>(block.capacity));
}

TEST(test_the_limit_holds) {
  start_anew(10 * kMiB, kLong);
  std::vector<Block> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(take_block(4 * kMiB));
  for (const Block& block : blocks) give_block(block);
  CHECK(cache_info().cached == 8 * kMiB);
  const Block newest = take_block(4 * kMiB);  // the oldest went first
  CHECK(newest.data == blocks[2].data || newest.data == blocks[3].data);
  give_block(newest);
  give_block(take_block(12 * kMiB));  // larger than the limit: no block is evicted
  CHECK(cache_info().cached == 8 * kMiB);
  bound_cache(5 * kMiB, kLong);
  CHECK(cache_info().cached == 4 * kMiB);
  bound_cache(0, kLong);
  CHECK(cache_info().cached == 0);
  give_block(take_block(kMiB));
  CHECK(cache_info().cached == 0);
}

TEST(test_idle_blocks_are_freed_in_time) {
  start_anew(64 * kMiB, milliseconds(300));
  give_block(take_block(4 * kMiB));
  give_block(take_block(2 * kMiB));
  check_empty_in_time();
  give_block(take_block(2 * kMiB));  // and the thread starts again
  CHECK(cache_info().cached == 2 * kMiB);
  check_empty_in_time();
  bound_cache(64 * kMiB, kLong);
  give_block(take_block(2 * kMiB));
  bound_cache(64 * kMiB, milliseconds(1));  // wakes the waiting thread
  check_empty_in_time();
}

TEST(test_impossible_sizes_are_refused) {
  start_anew(64 * kMiB, kLong);
  give_block(take_block(4 * kMiB));
  for (const int64_t nbytes : {INT64_MAX, int64_t{1} << 60}) {
    bool refused = false;
    try {
      take_block(nbytes);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
  CHECK(cache_info().in_use == 0);
}

// Blocks that two threads hold at once never share memory.
TEST(test_threads_do_not_share_blocks) {
  start_anew(8 * kMiB, milliseconds(1));
  std::atomic<int> wrong{0};
  const auto work = [&](int id) {
    Random random(static_cast<uint64_t>(id));
    for (int round = 0; round < 200; ++round) {
      const Block block = take_block(random.between(1, 3 * kMiB));
      auto* const bytes = static_cast<volatile char*>(block.data);
      const auto last = static_cast<size_t>(block.capacity) - 1;
      bytes[0] = bytes[last] = static_cast<char>(id);
      std::this_thread::yield();
      if (bytes[0] != id || bytes[last] != id) ++wrong;
      give_block(block);
      if (round % 50 == 0) clear_cache();
    }
  };
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id) threads.emplace_back(work, id);
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(cache_info().in_use == 0);
  CHECK(cache_info().cached <= 8 * kMiB);
}

void check_child() {
  CHECK(cache_info().cached == 0);
  CHECK(cache_info().in_use == 2 * kMiB);
  CHECK(cache_info().limit == 64 * kMiB);
  const Block block = take_block(4 * kMiB);
  write(block, 1);
  give_block(block);
  CHECK(take_block(4 * kMiB).data == block.data);
  bound_cache(64 * kMiB, milliseconds(10));
  give_block(block);
  check_empty_in_time();  // it has a thread of its own
}

TEST(test_a_forked_child_starts_empty) {
  start_anew(64 * kMiB, kLong);
  const Block held = take_block(2 * kMiB);
  const Block idle = take_block(4 * kMiB);
  write(held, 5);
  give_block(idle);
  const pid_t child = fork();
  if (child == 0) {
    check_child();
    CHECK(static_cast<const char*>(held.data)[9] == 5);
    give_block(held);
    CHECK(cache_info().in_use == 0);
    _exit(num_failures == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(cache_info().cached == 4 * kMiB);
  give_block(held);
  clear_cache();
}

// In a child, because there no thread frees idle blocks yet.
TEST(test_without_memory_a_block_is_unmapped) {
  start_anew(64 * kMiB, kLong);
  const pid_t child = fork();
  if (child == 0) {
    int failed = -1;
    do {
      const Block block = take_block(2 * kMiB);
      write(block, 1);
      num_allowed = ++failed;
      give_block(block);
      num_allowed = -1;
      sigset_t blocked;
      pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
      CHECK(sigismember(&blocked, SIGTERM) == 0);
      CHECK(cache_info().in_use == 0);
    } while (cache_info().cached == 0 && failed < 100);
    CHECK(failed >= 3);  // room in two lists, and a thread
    write(take_block(2 * kMiB), 2);
    _exit(num_failures == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
