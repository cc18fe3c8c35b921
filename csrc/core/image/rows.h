// The body of an image batch for a single lane, which writes consecutive rows. The
// loops over values are parameters, because each instruction set has its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/host_device.h"
#include "core/image/layout.h"
#include "core/image/math.h"
#include "core/pad_copy.h"
#include "core/work.h"

namespace pyparallel {

// The loops over values of a CPU thread are inlined into functions that are compiled
// for one instruction set each.

// A number of values that 2, 3 and 4 channels and the length of a vector divide.
constexpr int kPeriod = 48;
// The number of values that are converted at a time: the intermediate items stay in the
// first-level cache.
constexpr int kChunk = 32 * kPeriod;

// The levels of kPeriod consecutive values. `uniform`: all of them are equal.
struct Pattern {
  float shift[kPeriod];
  float scale[kPeriod];
  bool uniform;
};

// The loops of one instruction set. The pointers are to values, or to source items,
// without their types.
struct ImageLoops {
  // Converts `num` items to values. The first one has the first levels of the pattern.
  void (*convert)(void* to, const void* from, int64_t num, const Pattern& pattern);
  // to[i] = from[i * step] for i < num; step is 2, 3 or 4.
  void (*copy_strided)(void* to, const void* from, int64_t num, int64_t step);
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
  if (pattern.uniform) {
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
PP_HOST_INLINE void copy_each(Source* __restrict__ to, const Source* __restrict__ from,
                              int64_t num) {
  for (int64_t i = 0; i < num; ++i) to[i] = from[i * step];
}

template <typename Source>
PP_HOST_INLINE void copy_strided_loop(void* to, const void* from, int64_t num,
                                      int64_t step) {
  auto* items = static_cast<Source*>(to);
  const auto* first = static_cast<const Source*>(from);
  if (step == 3) return copy_each<Source, 3>(items, first, num);
  if (step == 4) return copy_each<Source, 4>(items, first, num);
  copy_each<Source, 2>(items, first, num);
}

// Interleaves planes, or pixels in reverse order of channels.
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

// The properties of the types of the loops.
struct ImageTypes {
  int64_t source_size;
  int64_t value_size;
  uint32_t fills[kMaxChannels];  // the bits of a value each
};

// `last`: the destination is (N, H, W, C), with 2 channels or more. Rows must not be
// cut. All writes go through the caches: non-temporal stores of converted lines took
// 15.0 to 21.1 ms for 206 MB of float32, instead of 12.2 to 18.4.
struct ImageRows {
  ImageBatch batch;
  ImageTypes types;
  ImageLoops loops;
  bool last;

  void operator()(Rows rows, Lane) const {
    while (rows.begin < rows.end) {
      const int64_t index = rows.begin / batch.height;
      const int64_t y = rows.begin - index * batch.height;
      const int64_t end = y + lesser(rows.end - rows.begin, batch.height - y);
      const Run run{batch.images[index], index, y, end};
      if (batch.mask != nullptr) write_mask(run);
      if (last) {
        write_pixels(run);
      } else {
        write_planes(run);
      }
      rows.begin += end - y;
    }
  }

 private:
  // The rows [begin, end) of the frame of an image.
  struct Run {
    const Image& image;
    int64_t index;
    int64_t begin;
    int64_t end;

    // Returns the first of these rows without pixels.
    int64_t data_end() const {
      const int64_t height = image.width == 0 ? 0 : image.height;
      return greater(lesser(end, height), begin);
    }
  };

  Pattern pattern_of(int channel, int count) const {
    Pattern pattern;
    for (int k = 0; k < kPeriod; ++k) {
      pattern.shift[k] = batch.levels.shift[channel + k % count];
      pattern.scale[k] = batch.levels.scale[channel + k % count];
    }
    pattern.uniform = count == 1;
    return pattern;
  }

  Fill fill_of(int channel) const {
    const uint64_t bits = types.fills[channel];
    const uint64_t word =
        types.value_size == 4 ? bits << 32 | bits : bits * (~0ull / 0xFFFF);
    return {word, word};
  }

  void write_mask(const Run& run) const {
    uint8_t* to = batch.mask + (run.index * batch.height + run.begin) * batch.width;
    const auto width = static_cast<size_t>(batch.width);
    const size_t data = run.image.width;
    const int64_t data_end = run.data_end();
    for (int64_t y = run.begin; y < data_end; ++y, to += width) {
      memset(to, 1, data);
      memset(to + data, 0, width - data);
    }
    memset(to, 0, static_cast<size_t>(run.end - data_end) * width);
  }

  void write_planes(const Run& run) const {
    Pattern patterns[kMaxChannels];
    const int64_t row_nbytes = batch.width * types.value_size;
    uint8_t* planes[kMaxChannels];
    for (int c = 0; c < batch.channels; ++c) {
      const int64_t plane = run.index * batch.channels + c;
      planes[c] = static_cast<uint8_t*>(batch.dst) + plane * batch.height * row_nbytes;
      patterns[c] = pattern_of(c, 1);
    }
    const int64_t data = run.image.width;
    const int64_t data_end = run.data_end();
    for (int64_t y = run.begin; y < data_end; ++y) {
      const auto from = row_of(run, y);
      for (int c = 0; c < batch.channels; ++c) {
        uint8_t* to = planes[c] + y * row_nbytes;
        write_row(to, from, c, patterns[c], data);
        if (data == batch.width) continue;
        to += data * types.value_size;
        fill_bytes(to, (batch.width - data) * types.value_size, fill_of(c));
      }
    }
    for (int c = 0; c < batch.channels; ++c) {
      const int64_t nbytes = (run.end - data_end) * row_nbytes;
      fill_bytes(planes[c] + data_end * row_nbytes, nbytes, fill_of(c));
    }
  }

  // Returns a row with a pointer to bytes; its steps count items.
  Pixels<uint8_t> row_of(const Run& run, int64_t y) const {
    if (types.source_size == 1) return pixels_at<uint8_t>(batch, run.image, y, 0);
    const Pixels<float> row = pixels_at<float>(batch, run.image, y, 0);
    return {reinterpret_cast<const uint8_t*>(row.first), row.next_column,
            row.next_channel};
  }

  void write_row(uint8_t* to, const Pixels<uint8_t>& row, int channel,
                 const Pattern& pattern, int64_t count) const {
    const uint8_t* from = row.first + channel * row.next_channel * types.source_size;
    if (row.next_column == 1) {
      loops.convert(to, from, count, pattern);
      return;
    }
    alignas(64) uint8_t items[kChunk * sizeof(float)];
    for (int64_t done = 0; done < count; done += kChunk) {
      const int64_t num = lesser(kChunk, count - done);
      loops.copy_strided(items, from + done * row.next_column * types.source_size, num,
                         row.next_column);
      loops.convert(to + done * types.value_size, items, num, pattern);
    }
  }

  void write_pixels(const Run& run) const {
    const int64_t pixel_nbytes = batch.channels * types.value_size;
    const Pattern pattern = pattern_of(0, batch.channels);
    const int64_t row = run.index * batch.height + run.begin;
    uint8_t* to = static_cast<uint8_t*>(batch.dst) + row * batch.width * pixel_nbytes;
    const int64_t data = run.image.width;
    const int64_t data_end = run.data_end();
    for (int64_t y = run.begin; y < data_end; ++y) {
      write_pixel_row(to, row_of(run, y), pattern, data);
      fill_pixels(to + data * pixel_nbytes, (batch.width - data) * pixel_nbytes);
      to += batch.width * pixel_nbytes;
    }
    fill_pixels(to, (run.end - data_end) * batch.width * pixel_nbytes);
  }

  void write_pixel_row(uint8_t* to, const Pixels<uint8_t>& row, const Pattern& pattern,
                       int64_t count) const {
    const int64_t channels = batch.channels;
    if (row.next_column == channels && row.next_channel == 1) {
      loops.convert(to, row.first, count * channels, pattern);
      return;
    }
    alignas(64) uint8_t items[kChunk * sizeof(float)];
    const int64_t each = kChunk / channels;
    for (int64_t done = 0; done < count; done += each) {
      const int64_t num = lesser(each, count - done);
      loops.interleave(items, row.first + done * row.next_column * types.source_size,
                       num, channels, row.next_column, row.next_channel);
      loops.convert(to + done * channels * types.value_size, items, num * channels,
                    pattern);
    }
  }

  // Fills `nbytes` of whole pixels.
  void fill_pixels(uint8_t* to, int64_t nbytes) const {
    uint8_t pixels[kPeriod * sizeof(float)];
    const int64_t each = kPeriod * types.value_size;
    for (int k = 0; k < kPeriod; ++k) {
      const uint32_t bits = types.fills[k % batch.channels];
      memcpy(pixels + k * types.value_size, &bits,
             static_cast<size_t>(types.value_size));
    }
    for (int64_t done = 0; done < nbytes; done += each) {
      memcpy(to + done, pixels, static_cast<size_t>(lesser(each, nbytes - done)));
    }
  }
};

}  // namespace pyparallel
