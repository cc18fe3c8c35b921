// The one way to use more than one CPU thread.
#pragma once

#include <cstdint>

namespace pyparallel::cpu {

// Runs task(context, worker) for every worker in [0, num_workers), on as many threads,
// and returns when all are done. In a process that was forked after this module was
// loaded it runs them one after the other: OpenMP's threads do not survive a fork, and
// waiting for them would never end. A task must not throw.
using Task = void (*)(const void* context, int64_t worker);
void run_workers(int64_t num_workers, Task task, const void* context);

// Workers worth starting for a copy that writes nbytes; at least 1.
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

// True in a process forked from the one that loaded this module.
bool forked();

}  // namespace pyparallel::cpu
