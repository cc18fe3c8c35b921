// The body of an image batch for lanes that share rows. A lane makes sixteen bytes of
// the destination at a time, next to the bytes of its neighbour.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/image/job.h"
#include "core/image/layout.h"
#include "core/image/math.h"
#include "core/words.h"
#include "core/work.h"

namespace pyparallel {

// Returns four bytes of a mask. The first `count` are 1, the others 0.
PP_HOST_DEVICE uint32_t mask_bytes(int count) {
  constexpr uint32_t kOnes = ~0u / 255;
  if (count <= 0) return 0;
  return count >= 4 ? kOnes : kOnes >> (8 * (4 - count));
}

// `num` consecutive values of a source, read in words of four bytes, or of sixteen if
// the address is aligned. Words of uint8 values are read from aligned addresses and
// shifted into place. So up to kMargin items on both sides are read too.
//
// The groups of a lane are at distances that 4 divides, so all of them have the
// alignment of a first place.
template <typename Source, int num, typename Math>
struct SourceGroup;

template <int num, typename Math>
struct SourceGroup<uint8_t, num, Math> {
  static constexpr int kMargin = 4;
  static constexpr int kWords = num / 4;

  struct Place {
    const uint32_t* words;
    uint32_t shift;
  };

  uint32_t words[kWords + 1];
  uint32_t shift;

  PP_HOST_DEVICE static Place place_of(const uint8_t* from) {
    const auto past = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) & 3);
    return {reinterpret_cast<const uint32_t*>(from - past), 8 * past};
  }

  PP_HOST_DEVICE void load(const Place& place, int distance) {
    shift = place.shift;
    const uint32_t* first = place.words + distance / 4;
    for (int w = 0; w <= kWords; ++w) words[w] = Math::load(first + w);
  }

  PP_HOST_DEVICE float value(int k) const {
    const uint32_t word = shifted(words[k / 4], words[k / 4 + 1], shift);
    return static_cast<float>((word >> (8 * (k % 4))) & 255);
  }
};

template <int num, typename Math>
struct SourceGroup<float, num, Math> {
  static constexpr int kMargin = 0;

  struct Place {
    const float* first;
    bool aligned;
  };

  float values[num];

  PP_HOST_DEVICE static Place place_of(const float* from) {
    return {from, (reinterpret_cast<uintptr_t>(from) & 15) == 0};
  }

  PP_HOST_DEVICE void load(const Place& place, int distance) {
    const float* from = place.first + distance;
    if (place.aligned) {
      for (int w = 0; w < num / 4; ++w) Math::load_four(from + 4 * w, values + 4 * w);
    } else {
      for (int k = 0; k < num; ++k) values[k] = Math::load(from + k);
    }
  }

  PP_HOST_DEVICE float value(int k) const { return values[k]; }
};

// The levels of consecutive values of a row: one channel, or C channels in turn.
template <int C>
struct ChannelCycle {
  Level levels[C];

  // Returns the cycle that begins with value number `at`.
  PP_HOST_DEVICE ChannelCycle rotated(int at) const {
    if (C == 1) return *this;
    const int phase = static_cast<int>(static_cast<unsigned>(at) % C);
    ChannelCycle rotated_cycle = *this;
    for (int p = 1; p < C; ++p) {
      for (int k = 0; k < C; ++k) {
        if (phase == p) rotated_cycle.levels[k] = levels[(k + p) % C];
      }
    }
    return rotated_cycle;
  }
};

// Source: uint8_t or float. Value: float, Half or BFloat16. An image may have either
// layout, whatever `layout` says. A piece has less than 2**29 values. `batch` is a
// reference, because its levels are indexed: on a device the original is in constant
// memory, and a copy would be in local memory.
template <typename Source, typename Value, bool exact, RowLayout layout, typename Math>
struct ImageLanes {
  static constexpr RowLayout kLayout = layout;
  const ImageBatch& batch;
  const Image* images;

  PP_HOST_DEVICE void operator()(Rows rows, Lane lane) const {
    PP_ROLLED
    for (int64_t n = rows.begin; n < rows.end; n += rows.step) {
      const ImageSpan span = image_span(batch, images, n);
      if (batch.mask != nullptr) write_mask(span, lane);
      Pixels<Source> from{nullptr, 0, 0};
      if (span.data > 0) {
        from = pixels_at<Source>(batch, *span.image, span.y, span.first);
      }
      if constexpr (layout != RowLayout::kPixels) {
        write_planes(span, from, lane);
      } else if (batch.channels == 3) {
        write_pixels(span, from, lane);
      } else {
        write_each(span, from, lane);
      }
    }
  }

 private:
  static constexpr int kGroup = 16 / static_cast<int>(sizeof(Value));
  // The number of groups that a lane reads before it converts the first of them. The
  // registers of a device limit it.
  static constexpr bool kMuchWork = exact && sizeof(Value) == 2;
  static constexpr int kAhead = sizeof(Source) == 1 && !kMuchWork ? 4 : 2;

  // A row, or a piece of one, as a run of values of C alternating channels.
  template <int C>
  struct ValueRun {
    Value* to;
    int count;
    int data;  // the number of values from the image; fill values follow
    Pixels<Source> from;
    ChannelCycle<C> cycle;
    bool dense;  // contiguous sources, with kMargin more items on both sides
  };

  PP_HOST_DEVICE static float normalized(float x, const Level& level) {
    if (!exact) return Math::multiply_add(x, level.scale, level.shift);
    return Math::divide(Math::subtract(x, level.shift), level.scale);
  }

  // Whether quotients of whole groups take three operations. See Note: [three
  // operations] in core/image/math.h.
  static constexpr bool kInverse = exact && sizeof(Source) == 1;

  // The same value, in a group.
  PP_HOST_DEVICE static float grouped(float x, const Level& level) {
    if constexpr (kInverse) {
      return quotient<Math>(Math::subtract(x, level.shift), level.scale, level.inverse);
    }
    return normalized(x, level);
  }

  // Returns true if `grouped` may compute values of a channel. Values of all others are
  // written one by one: their mean or std is beyond any use.
  PP_HOST_DEVICE static bool has_inverse(const Level& level) {
    return !kInverse || Math::bits(level.inverse) != 0;
  }

  PP_HOST_DEVICE static void store(Value* to, const float (&values)[kGroup]) {
    uint32_t words[4];
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(Value) == 4) {
        words[w] = Math::bits(values[w]);
      } else {
        words[w] = Math::pair(values[2 * w], values[2 * w + 1], Value{});
      }
    }
    Math::store(to, words);
  }

  // Returns true if the image has kMargin items before and after `count` items at
  // `from`.
  PP_HOST_DEVICE bool has_margin(const ImageSpan& span, const Source* from,
                                 int64_t count) const {
    constexpr int64_t kMargin = SourceGroup<Source, kGroup, Math>::kMargin;
    const int64_t area = static_cast<int64_t>(span.image->height) * span.image->width;
    const int64_t before = from - static_cast<const Source*>(span.image->data);
    return before >= kMargin && before + count + kMargin <= area * batch.channels;
  }

  PP_HOST_DEVICE void write_mask(const ImageSpan& span, Lane lane) const {
    uint8_t* to = batch.mask + (span.index * batch.height + span.y) * batch.width;
    to += span.first;
    const auto count = static_cast<int>(span.count);
    const auto data = static_cast<int>(span.data);
    const int head = items_to_word(to, count);
    const int tail = count - (count - head) % 16;
    const int edges = head + count - tail;
    PP_ROLLED
    for (int edge = lane.index; edge < edges; edge += lane.count) {
      const int at = edge < head ? edge : edge - head + tail;
      to[at] = at < data;
    }
    PP_ROLLED
    for (int at = head + 16 * lane.index; at < tail; at += 16 * lane.count) {
      uint32_t words[4];
      for (int w = 0; w < 4; ++w) words[w] = mask_bytes(data - at - 4 * w);
      Math::store(to + at, words);
    }
  }

  PP_HOST_DEVICE void write_planes(const ImageSpan& span, const Pixels<Source>& from,
                                   Lane lane) const {
    const int64_t plane = batch.height * batch.width;
    const int64_t row = span.index * batch.channels * batch.height + span.y;
    ValueRun<1> first{static_cast<Value*>(batch.dst) + row * batch.width + span.first,
                      static_cast<int>(span.count),
                      static_cast<int>(span.data),
                      from,
                      ChannelCycle<1>{},
                      false};
    int done = 0;
    if constexpr (layout == RowLayout::kPlanesOfPixels) {
      if (from.next_column == 3 && plane % kGroup == 0) {
        const Source* begin = from.next_channel > 0 ? from.first : from.first - 2;
        bool groups = has_margin(span, begin, 3 * span.data);
        for (int c = 0; c < 3; ++c) groups &= has_inverse(level_of(batch.levels, c));
        if (groups) {
          done = write_three_planes(first, begin, lane);
        }
      }
    }
    // Sums, because the compiler would compute a product again for each load.
    ValueRun<1> run = first;
    PP_ROLLED
    for (int c = 0; c < batch.channels; ++c) {
      run.cycle.levels[0] = level_of(batch.levels, c);
      run.dense = from.next_column == 1 && has_margin(span, run.from.first, span.data);
      write(run, done, lane);
      run.to += plane;
      run.from.first += from.next_channel;
    }
  }

  // Writes pixels of three channels.
  PP_HOST_DEVICE void write_pixels(const ImageSpan& span, const Pixels<Source>& from,
                                   Lane lane) const {
    const int64_t row = (span.index * batch.height + span.y) * batch.width;
    ValueRun<3> run{static_cast<Value*>(batch.dst) + (row + span.first) * 3,
                    static_cast<int>(span.count) * 3,
                    static_cast<int>(span.data) * 3,
                    from,
                    ChannelCycle<3>{},
                    from.next_column == 3 && from.next_channel == 1 &&
                        has_margin(span, from.first, span.data * 3)};
    for (int c = 0; c < 3; ++c) run.cycle.levels[c] = level_of(batch.levels, c);
    write(run, 0, lane);
  }

  // Writes pixels of any number of channels, value by value. This case is rare, so it
  // is kept small.
  PP_HOST_DEVICE void write_each(const ImageSpan& span, const Pixels<Source>& from,
                                 Lane lane) const {
    const int channels = batch.channels;
    const int64_t row = (span.index * batch.height + span.y) * batch.width;
    Value* to = static_cast<Value*>(batch.dst) + (row + span.first) * channels;
    const auto data = static_cast<int>(span.data);
    const int count = static_cast<int>(span.count) * channels;
    PP_ROLLED
    for (int at = lane.index; at < count; at += lane.count) {
      const int column = at / channels;
      const int channel = at - column * channels;
      const Level level = level_of(batch.levels, channel);
      float value = level.fill;
      if (column < data) {
        const Source* item = from.first + column * from.next_column;
        item += channel * from.next_channel;
        value = normalized(static_cast<float>(Math::load(item)), level);
      }
      to[at] = Math::round(value, Value{});
    }
  }

  template <bool in_group, int C>
  PP_HOST_DEVICE static float value_at(const ValueRun<C>& run, int at,
                                       const Level& level) {
    if (at >= run.data) return level.fill;
    const auto column = static_cast<int64_t>(static_cast<unsigned>(at) / C);
    const auto channel = static_cast<int64_t>(static_cast<unsigned>(at) % C);
    const Source* from = run.from.first + column * run.from.next_column;
    if (C > 1) from += channel * run.from.next_channel;
    const auto x = static_cast<float>(Math::load(from));
    return in_group ? grouped(x, level) : normalized(x, level);
  }

  // Returns the number of values of [head, end) in whole groups.
  PP_HOST_DEVICE static int whole_groups(int head, int end) {
    return end > head ? (end - head) / kGroup * kGroup : 0;
  }

  // Writes a run. The first `done` values of its groups are written already. Groups of
  // data alone, or of fill alone, are written as words, other values one by one. A
  // plane of an image of pixels is written one by one, unless the body is for such
  // images.
  template <int C>
  PP_HOST_DEVICE static void write(const ValueRun<C>& run, int done, Lane lane) {
    const int head = items_to_word(run.to, run.count);
    const int tail = head + whole_groups(head, run.count);
    bool groups = run.dense || C > 1;
    for (int k = 0; k < C; ++k) groups &= has_inverse(run.cycle.levels[k]);
    const int whole = head + (groups ? whole_groups(head, run.data) : done);
    const int fill = lesser_int(tail, head + whole_groups(head, run.data + kGroup - 1));
    const int mixed = head + fill - whole;
    const int edges = mixed + run.count - tail;
    PP_ROLLED
    for (int edge = lane.index; edge < edges; edge += lane.count) {
      int at = edge;
      if (edge >= head) at += edge < mixed ? whole - head : tail - mixed;
      const Level level = run.cycle.rotated(at).levels[0];
      run.to[at] = Math::round(value_at<false>(run, at, level), Value{});
    }
    const int step = kGroup * lane.count;
    PP_ROLLED
    for (int at = head + done + kGroup * lane.index; at < whole; at += kAhead * step) {
      if (C > 1 && !run.dense) {
        gather(run, at, step, whole);
      } else {
        write_dense(run, at, step, whole);
      }
    }
    PP_ROLLED
    for (int at = fill + kGroup * lane.index; at < tail; at += step) {
      const ChannelCycle<C> cycle = run.cycle.rotated(at);
      float values[kGroup];
      for (int k = 0; k < kGroup; ++k) values[k] = cycle.levels[k % C].fill;
      store(run.to + at, values);
    }
  }

  // Writes groups of pixels whose channels are apart or in reverse order.
  template <int C>
  PP_HOST_DEVICE static void gather(const ValueRun<C>& run, int at, int step, int end) {
    PP_ROLLED
    for (int a = 0; a < kAhead && at < end; ++a, at += step) {
      const ChannelCycle<C> cycle = run.cycle.rotated(at);
      float values[kGroup];
      for (int k = 0; k < kGroup; ++k) {
        values[k] = value_at<true>(run, at + k, cycle.levels[k % C]);
      }
      store(run.to + at, values);
    }
  }

  template <int C>
  PP_HOST_DEVICE static void write_dense(const ValueRun<C>& run, int at, int step,
                                         int end) {
    using Group = SourceGroup<Source, kGroup, Math>;
    const typename Group::Place place = Group::place_of(run.from.first + at);
    Group groups[kAhead];
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * step < end) groups[a].load(place, a * step);
    }
    for (int a = 0; a < kAhead; ++a, at += step) {
      if (at >= end) break;
      const ChannelCycle<C> cycle = run.cycle.rotated(at);
      float values[kGroup];
      for (int k = 0; k < kGroup; ++k) {
        values[k] = grouped(groups[a].value(k), cycle.levels[k % C]);
      }
      store(run.to + at, values);
    }
  }

  // Writes contiguous pixels of three channels at `begin` to three planes. Returns the
  // number of values that each plane got from its first group on.
  PP_HOST_DEVICE int write_three_planes(const ValueRun<1>& first, const Source* begin,
                                        Lane lane) const {
    const int head = items_to_word(first.to, first.count);
    const int done = whole_groups(head, first.data);
    const int64_t plane = batch.height * batch.width;
    const int64_t next_plane = batch.swapped ? -plane : plane;
    Value* to = first.to + head + (batch.swapped ? 2 * plane : 0);
    PP_ROLLED
    for (int at = kGroup * lane.index; at < done; at += kGroup * lane.count) {
      using Group = SourceGroup<Source, 3 * kGroup, Math>;
      Group pixels;
      pixels.load(Group::place_of(begin + 3 * (head + at)), 0);
      for (int s = 0; s < 3; ++s) {
        const Level level = level_of(batch.levels, batch.swapped ? 2 - s : s);
        float values[kGroup];
        for (int k = 0; k < kGroup; ++k) {
          values[k] = grouped(pixels.value(3 * k + s), level);
        }
        store(to + s * next_plane + at, values);
      }
    }
    return done;
  }
};

}  // namespace pyparallel
