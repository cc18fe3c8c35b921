// Division by three operations (Note: [three operations] in core/image/math.h).
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "check.h"
#include "core/image/math.h"

namespace {

using namespace pyparallel;

constexpr int64_t kLeast = int64_t{1} << 23;  // the least mantissa of a float
constexpr int64_t kUnits = 8;

// Before its last rounding, the result of three operations differs from a / s by at
// most 7 / (2**25 * s). So it is wrong only if a / s is as close to the middle of two
// floats, which is an odd number M of 25 bits: a * 2**25 = s * M + c for a small c. (If
// a >= s, the factor is 2**24.) For each s and c, M modulo a power of two follows.
//
// Calls visit(a) for each such mantissa a.
template <typename Visit>
void visit_dividends(int64_t s, int bits, const Visit& visit) {
  const int zeros = __builtin_ctzll(static_cast<unsigned long long>(s));
  const auto odd = static_cast<uint32_t>(s >> zeros);
  uint32_t inverse = odd;  // modulo 2**32: each step doubles the number of right bits
  for (int step = 0; step < 4; ++step) inverse *= 2 - odd * inverse;
  const int64_t period = int64_t{1} << (bits - zeros);
  for (int64_t c = -kUnits; c <= kUnits; ++c) {
    // M is odd, so c has as many zeros as s.
    if (c == 0 || __builtin_ctzll(static_cast<unsigned long long>(c)) != zeros)
      continue;
    const auto rest = static_cast<uint32_t>(-(c >> zeros)) * inverse;
    int64_t middle = rest & static_cast<uint32_t>(period - 1);
    if (middle < 2 * kLeast) {
      middle += (2 * kLeast - middle + period - 1) / period * period;
    }
    for (; middle < 4 * kLeast; middle += period) {
      const int64_t a = (s * middle + c) >> bits;
      const bool is_mantissa = a >= kLeast && a < 2 * kLeast;
      if (is_mantissa && (a >= s) == (bits == 24)) visit(a);
    }
  }
}

TEST(test_every_quotient_near_the_middle_of_two_floats_is_exact) {
  int64_t num = 0;
  int64_t num_wrong = 0;
  int64_t num_rounded_twice = 0;
  for (int64_t s = kLeast; s < 2 * kLeast; ++s) {
    const auto std = static_cast<float>(s);
    const float inverse = exact_inverse(0, std);
    for (int bits : {24, 25}) {
      visit_dividends(s, bits, [&](int64_t dividend) {
        const auto a = static_cast<float>(dividend);
        const float expected = a / std;
        ++num;
        num_wrong += quotient<HostMath>(a, std, inverse) != expected;
        num_rounded_twice += a * inverse != expected;
      });
    }
  }
  CHECK(num_wrong == 0);
  // The search finds hard quotients: a multiplication by the inverse fails half of
  // them.
  CHECK(num == 46517418 && num_rounded_twice == 23260156);
}

void check_bytes(float mean, float std) {
  const float inverse = exact_inverse(mean, std);
  CHECK(inverse != 0);
  for (int byte = 0; byte < 256; ++byte) {
    const float difference = static_cast<float>(byte) - mean;
    const float expected = difference / std;
    const float found = quotient<HostMath>(difference, std, inverse);
    CHECK(float_bits(found) == float_bits(expected));
  }
}

// The signs of zeros and the ends of the range of exponents.
TEST(test_all_bytes_of_many_means_and_stds_are_divided_exactly) {
  constexpr float kMost = 1ll << 40;
  const float below = std::nextafter(kMost, 0.0f);
  const float above = std::nextafter(1 / kMost, 1.0f);
  const float magnitudes[] = {1 / kMost, above, 0x1p-20f, 0.225f, 1,    57.375f,
                              123.675f,  255,   0x1p20f,  below,  kMost};
  for (float std : magnitudes) {
    for (float sign : {1.0f, -1.0f}) {
      check_bytes(0, sign * std);
      check_bytes(-0.0f, sign * std);
      for (float mean : magnitudes) {
        check_bytes(sign * mean, std);
        check_bytes(mean, sign * std);
      }
      for (float near : {0.0f, 300.0f}) {
        check_bytes(std::nextafter(128.0f, near), sign * std);
      }
    }
  }
  Random random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    check_bytes(static_cast<float>(random.between(0, 2550000)) / 10000,
                static_cast<float>(random.between(1, 1000000)) / 10000);
  }
}

TEST(test_means_and_stds_beyond_any_use_have_no_inverse) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float beyond[] = {kInfinity, NAN,   1e38f, std::nextafter(0x1p40f, 1e38f),
                          1e-20f,    1e-45f};
  for (float value : beyond) {
    for (float sign : {1.0f, -1.0f}) {
      CHECK(exact_inverse(1, sign * value) == 0);
      CHECK(exact_inverse(sign * value, 1) == 0);
    }
  }
  CHECK(exact_inverse(1, 0) == 0 && exact_inverse(1, -0.0f) == 0);
  CHECK(exact_inverse(0, 2) == 0.5f && exact_inverse(-3, -4) == -0.25f);
}

}  // namespace
