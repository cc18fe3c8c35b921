// The body of an image batch for a lone lane, which writes consecutive rows: its loops
// over values are handed in, since each kind of CPU has its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/image.h"
#include "core/image_loops.h"
#include "core/pad_copy.h"
#include "core/rows.h"

namespace pyparallel {

// What a run knows of the types that its loops have.
struct ImageTypes {
  int64_t source_size;
  int64_t value_size;
  uint32_t fills[kMaxChannels];  // the bits of a value each
};

// `last`: the destination is (N, H, W, C), with 2 channels or more. Rows must not be
// cut. All is written through the caches: to convert into a line and to stream that
// past them took 15.0 to 21.1 ms for 206 MB of float32, where 12.2 to 18.4 are enough.
struct ImageRuns {
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
      if (batch.mask != nullptr) mark(run);
      if (last) {
        write_pixels(run);
      } else {
        write_planes(run);
      }
      rows.begin += end - y;
    }
  }

 private:
  // The rows [begin, end) of an image's frame.
  struct Run {
    const Image& image;
    int64_t index;
    int64_t begin;
    int64_t end;

    // The first of them that has no pixels.
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
    pattern.same = count == 1;
    return pattern;
  }

  Fill fill_of(int channel) const {
    const uint64_t bits = types.fills[channel];
    const uint64_t word =
        types.value_size == 4 ? bits << 32 | bits : bits * (~0ull / 0xFFFF);
    return {word, word};
  }

  void mark(const Run& run) const {
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

  // Pixels whose first is a pointer to bytes; steps are in items all the same.
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
      loops.take(items, from + done * row.next_column * types.source_size, num,
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

  // `nbytes` of whole pixels.
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
