// Rounding to sixteen bits, against a search among all their values.
#include <cmath>
#include <cstdint>

#include "check.h"
#include "core/image/math.h"
#include "image_batch.h"

namespace {

using namespace pyparallel;

void check_half(float value) {
  const uint16_t found = to_half(value).bits;
  if (std::isnan(value)) {
    CHECK((found & 0x7C00) == 0x7C00 && (found & 0x03FF) != 0);
  } else {
    CHECK(found == testing::nearest_half(static_cast<double>(value)));
  }
}

void check_bfloat16(float value) {
  const uint16_t found = to_bfloat16(value).bits;
  if (std::isnan(value)) {
    CHECK((found & 0x7F80) == 0x7F80 && (found & 0x007F) != 0);
  } else {
    CHECK(found == testing::nearest_bfloat16(static_cast<double>(value)));
  }
}

// Around each value and around the middle between it and the next one.
template <typename ValueOf, typename CheckValue>
void check_all(uint16_t infinity, const ValueOf& value_of, const CheckValue& check) {
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const auto value = static_cast<float>(value_of(bits));
    const bool is_last = bits + 1 == infinity;
    const float next =
        is_last ? 2 * value - static_cast<float>(value_of(bits - 1))
                : static_cast<float>(value_of(static_cast<uint16_t>(bits + 1)));
    const float middle = value / 2 + next / 2;
    for (float each : {value, middle}) {
      for (float near :
           {each, std::nextafter(each, INFINITY), std::nextafter(each, -INFINITY)}) {
        check(near);
        check(-near);
      }
    }
  }
}

TEST(test_every_float16_and_values_between) {
  check_all(0x7C00, testing::half_value, check_half);
  for (float value : {65504.0f, 65519.99f, 65520.0f, 65536.0f, 1e30f, INFINITY, NAN,
                      0.0f, 1e-30f, 1e-45f}) {
    check_half(value);
    check_half(-value);
  }
}

TEST(test_every_bfloat16_and_values_between) {
  check_all(0x7F80, testing::bfloat16_value, check_bfloat16);
  for (float value : {3.4e38f, 3.4028235e38f, INFINITY, NAN, 0.0f, 1e-45f}) {
    check_bfloat16(value);
    check_bfloat16(-value);
  }
}

TEST(test_values_of_float16_are_restored) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double value = testing::half_value(half);
    const double brain = testing::bfloat16_value(half);
    if (!std::isnan(value)) CHECK(to_half(static_cast<float>(value)).bits == half);
    if (!std::isnan(brain)) CHECK(to_bfloat16(static_cast<float>(brain)).bits == half);
  }
}

TEST(test_random_bits) {
  Random random(9);
  for (int trial = 0; trial < 200000; ++trial) {
    const float value = bits_float(static_cast<int32_t>(random.next()));
    check_half(value);
    check_bfloat16(value);
  }
}

}  // namespace
