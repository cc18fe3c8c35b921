// Running what may take long.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

namespace pyparallel::bindings {

// Copies of fewer bytes finish before another thread would have taken the lock.
constexpr int64_t kHoldGilBytes = 64 * 1024;

template <typename Job>
void run(Job* job) {
  if (job->nbytes() <= kHoldGilBytes) {
    job->run();
    return;
  }
  const pybind11::gil_scoped_release unlocked;
  job->run();
}

}  // namespace pyparallel::bindings
