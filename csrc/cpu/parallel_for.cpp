#include "cpu/parallel_for.h"

#include <unistd.h>

#if defined(PP_STD_THREADS)
#include <thread>
#include <vector>
#else
#include <ATen/Parallel.h>
#endif

namespace pyparallel::cpu {
namespace {

// A spinning thread starts at once, but a thread that has slept since the last batch
// must be woken. That costs more than it saves for fewer bytes.
constexpr int64_t kMinShared = 1024 * 1024;
// The smallest share of a thread.
constexpr int64_t kBytesPerWorker = 256 * 1024;

const pid_t kLoadedPid = getpid();

#if defined(PP_STD_THREADS)

int64_t max_workers() { return 4; }

void run_threads(int64_t num_workers, Task task, const void* context) {
  std::vector<std::thread> threads;
  for (int64_t worker = 1; worker < num_workers; ++worker) {
    threads.emplace_back(task, context, worker);
  }
  task(context, 0);
  for (std::thread& thread : threads) thread.join();
}

#else

int64_t max_workers() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_threads(int64_t num_workers, Task task, const void* context) {
  at::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) task(context, worker);
  });
}

#endif

}  // namespace

bool forked() { return getpid() != kLoadedPid; }

int64_t num_workers(int64_t nbytes) {
  if (nbytes < kMinShared) return 1;
  const int64_t wanted = nbytes / kBytesPerWorker;
  const int64_t limit = max_workers();
  if (limit <= 1 || forked()) return 1;
  return wanted < limit ? wanted : limit;
}

void run_workers(int64_t num_workers, Task task, const void* context) {
  if (forked()) {
    for (int64_t worker = 0; worker < num_workers; ++worker) task(context, worker);
    return;
  }
  run_threads(num_workers, task, context);
}

}  // namespace pyparallel::cpu
