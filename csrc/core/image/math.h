// The arithmetic of one value, and its implementation for the host.
//
// A Math class has the functions that differ between host and device. `Value` is a tag
// for the type of the result.
//   subtract(a, b), multiply(a, b), divide(a, b), multiply_add(a, b, c): rounded once,
//   as IEEE 754 says. round(a, Value): one value. pair(a, b, Value): the bits of two
//   values, the first one in the low half. bits(a): the bits of a float. load(from):
//   *from. That memory does not change while the body runs. load_four(from, to): four
//   floats from an address that 16 divides. store(to, words): four words to an address
//   that 16 divides.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"

namespace pyparallel {

// Floats of 16 bits. A float32 is rounded to the nearest of them, ties to even, and NaN
// stays NaN. The conversions have no branches, so that compilers vectorise loops over
// them.

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

PP_HOST_INLINE int32_t float_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PP_HOST_INLINE float bits_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

PP_HOST_INLINE Half to_half(float value) {
  constexpr int32_t kLeastNormal = 0x38800000;  // 2**-14
  constexpr int32_t kTooLarge = 0x47800000;     // 2**16
  constexpr int32_t kInfinity = 0x7F800000;
  constexpr int32_t kRebias = (127 - 15) << 23;
  const int32_t bits = float_bits(value);
  const int32_t magnitude = bits & 0x7FFFFFFF;
  // From half a step above 65504 on, the carry makes the result infinite.
  const int32_t odd = (magnitude >> 13) & 1;
  const int32_t normal = (magnitude - kRebias + 0xFFF + odd) >> 13;
  // The last bit of 0.5f has the value of the last bit of a subnormal half, so the
  // addition rounds.
  const int32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000;
  // Masks instead of `?:`: compilers do not make the addition above unconditional.
  const int32_t is_small = -static_cast<int32_t>(magnitude < kLeastNormal);
  const int32_t is_large = -static_cast<int32_t>(magnitude >= kTooLarge);
  const int32_t is_nan = -static_cast<int32_t>(magnitude > kInfinity);
  int32_t result = (subnormal & is_small) | (normal & ~(is_small | is_large));
  const int32_t nan = 0x0200 | ((magnitude >> 13) & 0x03FF);  // as F16C makes it
  result |= (0x7C00 & is_large) | (nan & is_nan);
  return {static_cast<uint16_t>(result | ((bits >> 16) & 0x8000))};
}

PP_HOST_INLINE BFloat16 to_bfloat16(float value) {
  const auto bits = static_cast<uint32_t>(float_bits(value));
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_number = (bits & 0x7FFFFFFF) <= 0x7F800000;
  return {static_cast<uint16_t>(is_number ? rounded : 0x7FC0)};
}

// Note: [three operations]
// A division costs a GPU about thirteen instructions. All divisors of a channel are
// equal, so y = 1 / s is computed once, rounded. Then q = a * y, r = a - s * q and
// q + r * y are three operations, each rounded once, and their result is a / s as IEEE
// 754 rounds it. It could differ only if a / s is close to the middle of two floats.
// test_quotient.cpp tries every such quotient of two mantissas. Loops of a CPU gain
// little or lose, so they divide.
//
// An overflow or an underflow on the way would change the result. Exponents of at most
// 40 exclude both: the smallest difference of a byte and such a mean is 2**-40, or the
// unit of a mean that is almost the byte, so the bits of r are above 2**-90.
// Differences of floats have no such limits, and are divided.

// Returns 1 / std if three operations divide every difference of a byte and `mean`
// exactly, else 0.
inline float exact_inverse(float mean, float std) {
  constexpr float kMost = 1ll << 40;
  const auto moderate = [](float value) {
    const float magnitude = value < 0 ? -value : value;
    return magnitude >= 1 / kMost && magnitude <= kMost;  // false for NaN
  };
  if (!moderate(std) || !(mean == 0 || moderate(mean))) return 0;
  return 1 / std;
}

// Returns a / std. `inverse` is the result of exact_inverse, and not 0.
template <typename Math>
PP_HOST_DEVICE float quotient(float a, float std, float inverse) {
  const float near = Math::multiply(a, inverse);
  const float rest = Math::multiply_add(-std, near, a);
  return Math::multiply_add(rest, inverse, near);
}

struct HostMath {
  PP_HOST_INLINE static float subtract(float a, float b) { return a - b; }
  PP_HOST_INLINE static float multiply(float a, float b) { return a * b; }
  PP_HOST_INLINE static float divide(float a, float b) { return a / b; }
  PP_HOST_INLINE static float multiply_add(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
  }

  PP_HOST_INLINE static float round(float value, float) { return value; }
  PP_HOST_INLINE static Half round(float value, Half) { return to_half(value); }
  PP_HOST_INLINE static BFloat16 round(float value, BFloat16) {
    return to_bfloat16(value);
  }

  template <typename Value>
  static uint32_t pair(float low, float high, Value tag) {
    const uint32_t above = round(high, tag).bits;
    return above << 16 | round(low, tag).bits;
  }

  static uint32_t bits(float value) { return static_cast<uint32_t>(float_bits(value)); }

  template <typename Word>
  static Word load(const Word* from) {
    Word word;
    memcpy(&word, from, sizeof(word));
    return word;
  }

  static void load_four(const float* from, float* to) {
    memcpy(to, from, 4 * sizeof(float));
  }

  static void store(void* to, const uint32_t (&words)[4]) {
    memcpy(to, words, sizeof(words));
  }
};

// For CPUs without an FMA instruction, where fma() is a library call. Two roundings are
// within the tolerance.
struct RoundingTwiceMath : HostMath {
  PP_HOST_INLINE static float multiply_add(float a, float b, float c) {
    return a * b + c;
  }
};

}  // namespace pyparallel
