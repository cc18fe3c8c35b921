// Work on several CPU threads. No other file starts threads for it.
#pragma once

#include <cstdint>

namespace pyparallel::cpu {

// Runs task(context, worker) for every worker in [0, num_workers), each on a thread,
// and returns when all are done. In a process that was forked after this module was
// loaded, the tasks run one after the other: OpenMP's threads do not survive a fork,
// and a wait for them would not end. A task must not throw.
using Task = void (*)(const void* context, int64_t worker);
void run_workers(int64_t num_workers, Task task, const void* context);

// Returns the number of workers for a copy that writes nbytes; at least 1.
int64_t num_workers(int64_t nbytes);

template <typename Body>
void parallel_for(int64_t num_workers, const Body& body) {
  if (num_workers <= 1) {
    body(int64_t{0});
    return;
  }
  run_workers(
      num_workers,
      [](const void* context, int64_t worker) {
        (*static_cast<const Body*>(context))(worker);
      },
      &body);
}

// Returns true in a process that was forked after this module was loaded.
bool forked();

}  // namespace pyparallel::cpu
