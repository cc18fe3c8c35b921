#include "cpu/cache_size.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace pyparallel::cpu {
namespace {

constexpr int64_t kMiB = 1024 * 1024;
// The default, and the upper limit: systems may report the cache of a whole socket, and
// virtual machines often do (480 MiB for two cores). A core fills only a part of it,
// and batches in flight compete for it. csrc/README.md has measurements.
constexpr int64_t kMaxBytes = 32 * kMiB;

// Returns the size of the third-level cache of CPU 0 that the kernel reports, such as
// "32768K", or 0.
int64_t size_from_kernel() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t size = 0;
  char unit = 0;
  if (!(file >> size >> unit) || unit != 'K' || size <= 0) return 0;
  return std::min(size, kMaxBytes / 1024) * 1024;
}

int64_t size_from_library() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  return 0;
#endif
}

int64_t detect_size() {
  const int64_t size = size_from_kernel();
  if (size > 0) return size;
  const int64_t reported = size_from_library();
  return reported > kMiB ? std::min(reported, kMaxBytes) : kMaxBytes;
}

}  // namespace

int64_t last_cache_bytes() {
  static const int64_t size = detect_size();
  return size;
}

}  // namespace pyparallel::cpu
