// Running what may take long.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstdint>
#include <exception>

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

template <typename Job>
void run(Job* job) {
  if (job->nbytes() <= kHoldGilBytes) {
    job->run();
    return;
  }
  std::exception_ptr error;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    job->run();
  } catch (...) {
    error = std::current_exception();
  }
  lock_again(state);
  if (error) std::rethrow_exception(error);
}

}  // namespace pyparallel::bindings
