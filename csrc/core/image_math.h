// The arithmetic of one value, and what the host does it with.
//
// A Math does what host and device do differently. For floats, and a tag Value{}:
//   subtract(a, b), divide(a, b), multiply_add(a, b, c): rounded once, as IEEE says;
//   round(a, Value): one value; pair(a, b, Value): the bits of two, the first one low;
//   bits(a): those of a float;
//   load(from): *from, which nobody writes while the body runs;
//   load_four(from, to): four floats from a multiple of sixteen;
//   store(to, words): four words to a multiple of sixteen.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/macros.h"

namespace pyparallel {

struct HostMath {
  PP_HOST_INLINE static float subtract(float a, float b) { return a - b; }
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

// For CPUs where fma() is a call into a library: within the tolerance all the same.
struct RoundingTwiceMath : HostMath {
  PP_HOST_INLINE static float multiply_add(float a, float b, float c) {
    return a * b + c;
  }
};

}  // namespace pyparallel
