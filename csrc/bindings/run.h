// Running what may take long.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <utility>

namespace pyparallel::bindings {

// Copies of fewer bytes finish before another thread would have taken the lock.
constexpr int64_t kHoldGilBytes = 64 * 1024;

// Note: [threads at the end]
// A daemon thread that wants the lock back when the interpreter has ended is ended by
// Python, up to 3.13, by unwinding its stack: from a destructor, as pybind11's, that
// aborts the process. Here the thread sleeps until the process is gone, as in 3.14.
inline void lock_again(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Calls work() without the lock.
template <typename Work>
void unlocked(const Work& work) {
  std::exception_ptr error;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  lock_again(state);
  if (error) std::rethrow_exception(error);
}

// Returns the result of work(), called without the lock.
template <typename Work>
auto result_unlocked(const Work& work) {
  std::optional<decltype(work())> result;
  unlocked([&] { result.emplace(work()); });
  return *std::move(result);
}

// A driver may block in any launch, however few bytes it writes.
template <typename Job>
void run(Job* job) {
  if (job->on_host() && job->nbytes() <= kHoldGilBytes) return job->run();
  unlocked([&] { job->run(); });
}

}  // namespace pyparallel::bindings
