// The loops over values of a CPU thread. Their bodies are inlined where they are used,
// to be compiled for one kind of CPU there.
#pragma once

#include <cstdint>

#include "core/image_math.h"
#include "core/macros.h"

namespace pyparallel {

// Of so many values every fourth, third, second one is of the same channel, and they
// are whole vectors.
constexpr int kPeriod = 48;
// Values that are worked on at a time: what is between source and destination stays in
// the first cache.
constexpr int kChunk = 32 * kPeriod;

// The levels of kPeriod consecutive values; `same` if all of them are equal.
struct Pattern {
  float shift[kPeriod];
  float scale[kPeriod];
  bool same;
};

// The loops. Pointers are to values, or to items of a source, but for their types.
struct ImageLoops {
  // `num` values from as many items; the first one is the first of the pattern.
  void (*convert)(void* to, const void* from, int64_t num, const Pattern& pattern);
  // to[i] = from[i * step] for i < num; step is 2, 3 or 4.
  void (*take)(void* to, const void* from, int64_t num, int64_t step);
  // to[i * channels + c] = from[i * next_column + c * next_channel] for i < num.
  void (*interleave)(void* to, const void* from, int64_t num, int64_t channels,
                     int64_t next_column, int64_t next_channel);
};

template <typename Source, typename Value, bool exact, typename Math>
PP_HOST_INLINE Value converted(Source item, float shift, float scale) {
  const auto x = static_cast<float>(item);
  if (exact) return Math::round(Math::divide(Math::subtract(x, shift), scale), Value{});
  return Math::round(Math::multiply_add(x, scale, shift), Value{});
}

template <typename Source, typename Value, bool exact, typename Math>
PP_HOST_INLINE void convert_loop(void* to, const void* from, int64_t num,
                                 const Pattern& pattern) {
  auto* __restrict__ values = static_cast<Value*>(to);
  const auto* __restrict__ items = static_cast<const Source*>(from);
  if (pattern.same) {
    const float shift = pattern.shift[0];
    const float scale = pattern.scale[0];
    for (int64_t i = 0; i < num; ++i) {
      values[i] = converted<Source, Value, exact, Math>(items[i], shift, scale);
    }
    return;
  }
  int64_t done = 0;
  for (; done + kPeriod <= num; done += kPeriod) {
    for (int k = 0; k < kPeriod; ++k) {
      values[done + k] = converted<Source, Value, exact, Math>(
          items[done + k], pattern.shift[k], pattern.scale[k]);
    }
  }
  for (int k = 0; done + k < num; ++k) {
    values[done + k] = converted<Source, Value, exact, Math>(
        items[done + k], pattern.shift[k], pattern.scale[k]);
  }
}

template <typename Source, int step>
PP_HOST_INLINE void take_each(Source* __restrict__ to, const Source* __restrict__ from,
                              int64_t num) {
  for (int64_t i = 0; i < num; ++i) to[i] = from[i * step];
}

template <typename Source>
PP_HOST_INLINE void take_loop(void* to, const void* from, int64_t num, int64_t step) {
  auto* items = static_cast<Source*>(to);
  const auto* first = static_cast<const Source*>(from);
  if (step == 3) return take_each<Source, 3>(items, first, num);
  if (step == 4) return take_each<Source, 4>(items, first, num);
  take_each<Source, 2>(items, first, num);
}

// Of planes, or of pixels the other way round.
template <typename Source, int channels>
PP_HOST_INLINE void interleave_each(Source* __restrict__ to,
                                    const Source* __restrict__ from, int64_t num,
                                    int64_t next_column, int64_t next_channel) {
  if (next_column == 1) {
    for (int64_t i = 0; i < num; ++i) {
      for (int c = 0; c < channels; ++c) {
        to[i * channels + c] = from[i + c * next_channel];
      }
    }
    return;
  }
  const Source* __restrict__ low = from - (channels - 1);
  for (int64_t i = 0; i < num; ++i) {
    for (int c = 0; c < channels; ++c) {
      to[i * channels + c] = low[i * channels + channels - 1 - c];
    }
  }
}

template <typename Source>
PP_HOST_INLINE void interleave_loop(void* to, const void* from, int64_t num,
                                    int64_t channels, int64_t next_column,
                                    int64_t next_channel) {
  auto* items = static_cast<Source*>(to);
  const auto* first = static_cast<const Source*>(from);
  if (channels == 3) {
    interleave_each<Source, 3>(items, first, num, next_column, next_channel);
  } else if (channels == 4) {
    interleave_each<Source, 4>(items, first, num, next_column, next_channel);
  } else {
    interleave_each<Source, 2>(items, first, num, next_column, next_channel);
  }
}

}  // namespace pyparallel
