// The body of an image batch for a lone lane, which writes consecutive rows: its loops
// over values are handed in, since each kind of CPU has its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Mover: as of pad-copy (core/pad_copy.h). `last`: the destination is (N, H, W, C),
// with 2 channels or more. Rows must not be cut.
template <typename Mover>
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
  static constexpr bool kDirect = std::is_same_v<Mover, CachedMover>;

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

  // What lies between source and destination.
  struct alignas(64) Room {
    uint8_t items[kChunk * sizeof(float)];
    uint8_t values[kChunk * sizeof(float)];
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

  void emit(Mover* mover, Room* room, uint8_t* to, const void* items, int64_t num,
            const Pattern& pattern) const {
    if (kDirect) {
      loops.convert(to, items, num, pattern);
    } else {
      loops.convert(room->values, items, num, pattern);
      mover->copy(to, room->values, num * types.value_size);
    }
  }

  void write_planes(const Run& run) const {
    Mover movers[kMaxChannels];
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
        write_row(&movers[c], to, from, c, patterns[c], data);
        if (data == batch.width) continue;
        to += data * types.value_size;
        movers[c].fill(to, (batch.width - data) * types.value_size, fill_of(c));
      }
    }
    for (int c = 0; c < batch.channels; ++c) {
      const int64_t nbytes = (run.end - data_end) * row_nbytes;
      if (nbytes > 0)
        movers[c].fill(planes[c] + data_end * row_nbytes, nbytes, fill_of(c));
      movers[c].finish();
    }
  }

  // Pixels whose first is a pointer to bytes; steps are in items all the same.
  Pixels<uint8_t> row_of(const Run& run, int64_t y) const {
    if (types.source_size == 1) return pixels_at<uint8_t>(batch, run.image, y, 0);
    const Pixels<float> row = pixels_at<float>(batch, run.image, y, 0);
    return {reinterpret_cast<const uint8_t*>(row.first), row.next_column,
            row.next_channel};
  }

  void write_row(Mover* mover, uint8_t* to, const Pixels<uint8_t>& row, int channel,
                 const Pattern& pattern, int64_t count) const {
    Room room;
    const uint8_t* from = row.first + channel * row.next_channel * types.source_size;
    for (int64_t done = 0; done < count; done += kChunk) {
      const int64_t num = lesser(kChunk, count - done);
      const void* items = from + done * row.next_column * types.source_size;
      if (row.next_column != 1) {
        loops.take(room.items, items, num, row.next_column);
        items = room.items;
      }
      emit(mover, &room, to + done * types.value_size, items, num, pattern);
    }
  }

  void write_pixels(const Run& run) const {
    const int64_t channels = batch.channels;
    const int64_t row_nbytes = batch.width * channels * types.value_size;
    const Pattern pattern = pattern_of(0, batch.channels);
    uint8_t* to = static_cast<uint8_t*>(batch.dst) +
                  (run.index * batch.height + run.begin) * row_nbytes;
    Mover mover;
    const int64_t data = run.image.width;
    const int64_t data_end = run.data_end();
    for (int64_t y = run.begin; y < data_end; ++y) {
      write_pixel_row(&mover, to, row_of(run, y), pattern, data);
      const int64_t done = data * channels * types.value_size;
      fill_pixels(&mover, to + done, batch.width - data);
      to += row_nbytes;
    }
    fill_pixels(&mover, to, (run.end - data_end) * batch.width);
    mover.finish();
  }

  void write_pixel_row(Mover* mover, uint8_t* to, const Pixels<uint8_t>& row,
                       const Pattern& pattern, int64_t count) const {
    Room room;
    const int64_t channels = batch.channels;
    const bool dense = row.next_column == channels && row.next_channel == 1;
    for (int64_t done = 0; done < count; done += kChunk / channels) {
      const int64_t num = lesser(kChunk / channels, count - done);
      const void* items = row.first + done * row.next_column * types.source_size;
      if (!dense) {
        loops.interleave(room.items, items, num, channels, row.next_column,
                         row.next_channel);
        items = room.items;
      }
      emit(mover, &room, to + done * channels * types.value_size, items, num * channels,
           pattern);
    }
  }

  void fill_pixels(Mover* mover, uint8_t* to, int64_t count) const {
    uint8_t pixels[kPeriod * sizeof(float)];
    const int64_t nbytes = count * batch.channels * types.value_size;
    const int64_t each = kPeriod * types.value_size;
    for (int k = 0; k < kPeriod; ++k) {
      const uint32_t bits = types.fills[k % batch.channels];
      memcpy(pixels + k * types.value_size, &bits,
             static_cast<size_t>(types.value_size));
    }
    for (int64_t done = 0; done < nbytes; done += each) {
      mover->copy(to + done, pixels, lesser(each, nbytes - done));
    }
  }
};

}  // namespace pyparallel
