// Floats of 16 bits, and how a float32 becomes one: the nearest, of two that are as
// near the even one; not a number stays that. Without branches, so that compilers turn
// loops over them into vector instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace pyparallel {

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
  // What lies above 65504 by half a step or more becomes infinity by its carry.
  const int32_t odd = (magnitude >> 13) & 1;
  const int32_t normal = (magnitude - kRebias + 0xFFF + odd) >> 13;
  // The last bit of 0.5 is the last one of a subnormal half, so the addition rounds.
  const int32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000;
  // Not `?:`, since compilers do not make an addition of floats unconditional.
  const int32_t is_small = -static_cast<int32_t>(magnitude < kLeastNormal);
  const int32_t is_large = -static_cast<int32_t>(magnitude >= kTooLarge);
  const int32_t is_none = -static_cast<int32_t>(magnitude > kInfinity);
  int32_t result = (subnormal & is_small) | (normal & ~(is_small | is_large));
  result |= (0x7C00 & is_large) | (0x0200 & is_none);
  return {static_cast<uint16_t>(result | ((bits >> 16) & 0x8000))};
}

PP_HOST_INLINE BFloat16 to_bfloat16(float value) {
  const auto bits = static_cast<uint32_t>(float_bits(value));
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_number = (bits & 0x7FFFFFFF) <= 0x7F800000;
  return {static_cast<uint16_t>(is_number ? rounded : 0x7FC0)};
}

}  // namespace pyparallel
