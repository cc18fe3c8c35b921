// What a lane works with: values that it has read, and the levels that they take.
#pragma once

#include <cstdint>

#include "core/image.h"
#include "core/macros.h"
#include "core/words.h"

namespace pyparallel {

// Four bytes, the first `count` of them 1.
PP_HOST_DEVICE uint32_t marks(int count) {
  constexpr uint32_t kOnes = ~0u / 255;
  if (count <= 0) return 0;
  return count >= 4 ? kOnes : kOnes >> (8 * (4 - count));
}

// `num` consecutive values of a source, read in words: four bytes together, or sixteen
// where their address allows it. Words of bytes lie on multiples of four and are
// shifted into place, so up to kAround items on both sides are read too.
template <typename Source, int num, typename Math>
struct SourceGroup;

template <int num, typename Math>
struct SourceGroup<uint8_t, num, Math> {
  static constexpr int kAround = 4;
  static constexpr int kWords = num / 4;
  uint32_t words[kWords + 1];
  uint32_t shift;

  PP_HOST_DEVICE void load(const uint8_t* from) {
    const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) & 3);
    shift = 8 * past;
    const auto* first = reinterpret_cast<const uint32_t*>(from - past);
    for (int w = 0; w <= kWords; ++w) words[w] = Math::load(first + w);
  }

  PP_HOST_DEVICE float value(int k) const {
    const uint32_t word = shifted(words[k / 4], words[k / 4 + 1], shift);
    return static_cast<float>((word >> (8 * (k % 4))) & 255);
  }
};

template <int num, typename Math>
struct SourceGroup<float, num, Math> {
  static constexpr int kAround = 0;
  float values[num];

  PP_HOST_DEVICE void load(const float* from) {
    if ((reinterpret_cast<uintptr_t>(from) & 15) == 0) {
      for (int w = 0; w < num / 4; ++w) Math::load_four(from + 4 * w, values + 4 * w);
    } else {
      for (int k = 0; k < num; ++k) values[k] = Math::load(from + k);
    }
  }

  PP_HOST_DEVICE float value(int k) const { return values[k]; }
};

// Levels of the values of a row in their order: of one channel, or of C in turn.
template <int C>
struct Turns {
  Level levels[C];

  // As seen from value number `at` on.
  PP_HOST_DEVICE Turns from(int at) const {
    if (C == 1) return *this;
    const int phase = static_cast<int>(static_cast<unsigned>(at) % C);
    Turns turned = *this;
    for (int p = 1; p < C; ++p) {
      for (int k = 0; k < C; ++k) {
        if (phase == p) turned.levels[k] = levels[(k + p) % C];
      }
    }
    return turned;
  }
};

}  // namespace pyparallel
