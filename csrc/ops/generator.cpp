#include "ops/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <pthread.h>

#include <chrono>
#include <mutex>
#include <thread>

namespace pyparallel::ops {
namespace {

constexpr std::chrono::microseconds kPause{100};
// The thread with the mutex may wait for the GIL, which the forking thread has.
constexpr std::chrono::seconds kTimeout{1};

thread_local bool is_held = false;

std::mutex& mutex() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  return generator.mutex();  // of the implementation, which is never freed
}

void before_fork() {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!(is_held = mutex().try_lock())) {
    if (std::chrono::steady_clock::now() >= end) return;
    std::this_thread::sleep_for(kPause);
  }
}

// Runs in the parent, and in the only thread of the child.
void after_fork() {
  if (is_held) mutex().unlock();
  is_held = false;
}

}  // namespace

void hold_generator_in_forks() {
  static const int registered = pthread_atfork(before_fork, after_fork, after_fork);
  static_cast<void>(registered);
}

}  // namespace pyparallel::ops
