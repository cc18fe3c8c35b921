// Overflow-checked arithmetic, and row division; fuzz_plan.cpp has models of the rest.
#include <cstdint>
#include <limits>

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

TEST(test_row_division_on_both_sides_of_32_bits) {
  const int64_t edges[] = {0,
                           1,
                           2,
                           3,
                           (int64_t{1} << 32) - 1,
                           int64_t{1} << 32,
                           (int64_t{1} << 32) + 1,
                           int64_t{1} << 40,
                           kMax};
  for (int64_t n : edges) {
    for (int64_t d : edges) {
      if (d == 0) continue;
      const Division result = divide_row(n, d);
      CHECK(result.quotient == n / d && result.remainder == n % d);
    }
  }
}

}  // namespace
