// Overflow-checked arithmetic, and row division; fuzz_plan.cpp has models of the rest.
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "core/boxes.h"
#include "core/checked.h"

namespace {

using namespace pyparallel;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(test_overflow_is_reported) {
  int64_t result = 0;
  CHECK(checked_add(kMax - 1, 1, &result) && result == kMax);
  CHECK(!checked_add(kMax, 1, &result));
  CHECK(checked_mul(int64_t{1} << 31, int64_t{1} << 31, &result));
  CHECK(result == int64_t{1} << 62);
  CHECK(!checked_mul(int64_t{1} << 32, int64_t{1} << 31, &result));
}

TEST(test_narrowing_keeps_the_value_or_fails) {
  uint32_t narrow = 0;
  CHECK(checked_narrow(int64_t{2}, &narrow) && narrow == 2);
  CHECK(!checked_narrow((int64_t{1} << 32) + 2, &narrow));
  CHECK(!checked_narrow(int64_t{-1}, &narrow));
}

// Around each power of two and around each multiple: a multiplier that is one too small
// or too large is wrong there first.
TEST(test_divisions_on_both_sides_of_31_bits) {
  std::vector<int64_t> divisors{kMax, 3, 7, 28, 800, 1333, 83 * 3 * 1344};
  for (int bit = 0; bit < 63; ++bit) {
    for (int64_t near : {-1, 0, 1}) divisors.push_back((int64_t{1} << bit) + near);
  }
  for (int64_t d : divisors) {
    if (d == 0) continue;
    std::vector<int64_t> numbers = divisors;
    for (int bit = 0; bit < 62; ++bit) {
      const int64_t quotient = (int64_t{1} << bit) / d;
      for (int64_t times : {quotient, quotient + 1}) {
        if (times >= kMax / d) continue;
        numbers.insert(numbers.end(), {times * d, times * d + d - 1});
      }
      if (quotient > 0) numbers.push_back(quotient * d - 1);
    }
    for (int64_t n : numbers) {
      if (n < 0) continue;
      const Division result = Divisor(d).divide(n);
      CHECK(result.quotient == n / d && result.remainder == n % d);
    }
  }
}

}  // namespace
