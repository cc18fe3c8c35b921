#include "ops/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <thread>

namespace pyparallel::ops {
namespace {

constexpr std::chrono::microseconds kPause{100};

std::mutex& mutex() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  return generator.mutex();  // of the implementation, which is never freed
}

}  // namespace

bool lock_generator(std::chrono::duration<double> timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!mutex().try_lock()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

void unlock_generator() { mutex().unlock(); }

}  // namespace pyparallel::ops
