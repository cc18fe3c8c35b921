// Runs long operations without the GIL.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <utility>

namespace pyparallel::bindings {

// Smaller copies finish before another thread could take the GIL.
constexpr int64_t kHoldGilBytes = 64 * 1024;

// Note: [threads at the end]
// A daemon thread may ask for the GIL after the interpreter has ended. Up to
// Python 3.13, the interpreter then unwinds the stack of the thread. From a destructor,
// as in pybind11, this aborts the process. Here the thread sleeps until the process
// ends, as in 3.14.
inline void lock_again(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Calls work() without the GIL.
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

// Returns the result of work(), called without the GIL.
template <typename Work>
auto result_unlocked(const Work& work) {
  std::optional<decltype(work())> result;
  unlocked([&] { result.emplace(work()); });
  return *std::move(result);
}

// A driver may block in any launch, so jobs on a device always release the GIL.
template <typename Job>
void run(Job* job) {
  if (job->on_host() && job->nbytes() <= kHoldGilBytes) return job->run();
  unlocked([&] { job->run(); });
}

}  // namespace pyparallel::bindings
