// The interface of a fuzz target: one case, made from the bytes of an input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "check.h"

namespace pyparallel::testing {

constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

class FuzzedNumbers {
 public:
  FuzzedNumbers(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool done() const { return at_ == end_; }

  // Returns contents. No branch depends on them, so they take no bytes of the input.
  uint64_t next() { return contents_.next(); }

  // Returns a number in [low, high] from the fewest bytes; `low` after the end of
  // input.
  int64_t between(int64_t low, int64_t high) {
    const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t drawn = 0;
    for (uint64_t rest = span; rest > 0 && !done(); rest >>= 8) {
      drawn = drawn << 8 | *at_++;
    }
    if (span < ~uint64_t{0}) drawn %= span + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + drawn);
  }

  int64_t one_of(std::initializer_list<int64_t> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

  // Returns any number, often one at the limits of arithmetic.
  int64_t raw() {
    switch (between(0, 5)) {
      case 0:
        return between(0, 9);
      case 1:
        return (int64_t{1} << between(0, 62)) + between(-2, 2);
      case 2:
        return kMax64 - between(0, 130);
      case 3:
        return kMin64 + between(0, 130);
      case 4:
        return between(-70, 70);
      default:
        return between(kMin64, kMax64);
    }
  }

  // Likewise, from 0 on.
  int64_t raw_size() {
    const int64_t number = raw();
    return number < 0 ? -(number + 1) : number;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  Random contents_{1};
};

// The target. Each fuzz_*.cpp defines one.
void fuzz(FuzzedNumbers* numbers);

}  // namespace pyparallel::testing
