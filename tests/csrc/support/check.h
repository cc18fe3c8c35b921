// A check that survives NDEBUG, and random numbers that are the same everywhere. Cases
// are made from any source of numbers with next() and between(), such as Random here or
// the bytes of a fuzzer (fuzz.h).
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

inline int num_failures = 0;

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition) && ++num_failures <= 20) {                           \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                     \
  } while (false)

// Tests run in the order of their definitions (run_tests.cpp).
inline std::vector<void (*)()>& all_tests() {
  static std::vector<void (*)()> tests;
  return tests;
}

struct Registered {
  explicit Registered(void (*test)()) { all_tests().push_back(test); }
};

#define TEST(name)                    \
  void name();                        \
  const Registered run_##name{&name}; \
  void name()

// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  // In [low, high].
  int64_t between(int64_t low, int64_t high) {
    const auto span = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(next() % span);
  }

 private:
  uint64_t state_;
};
