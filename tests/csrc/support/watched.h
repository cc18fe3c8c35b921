// The reads that a test allows: aligned, and within the watched memory.
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"

namespace pyparallel::testing {

class Watched {
 public:
  static void forget() { memory().clear(); }

  static void allow(const void* data, int64_t nbytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    memory().push_back({begin, begin + static_cast<uintptr_t>(nbytes)});
  }

  static void check(const void* from, uintptr_t nbytes) {
    const auto begin = reinterpret_cast<uintptr_t>(from);
    bool allowed = false;
    for (const Memory& each : memory()) {
      allowed |= begin >= each.begin && begin + nbytes <= each.end;
    }
    CHECK(allowed && begin % nbytes == 0);
  }

 private:
  struct Memory {
    uintptr_t begin;
    uintptr_t end;
  };

  static std::vector<Memory>& memory() {
    static std::vector<Memory> allowed;
    return allowed;
  }
};

}  // namespace pyparallel::testing
