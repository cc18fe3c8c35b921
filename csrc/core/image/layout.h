// A padded, normalised batch of ragged images, and the arithmetic from the number of a
// row to its pixels.
//
// A destination is (N, C, H, W), planes of rows, or (N, H, W, C), rows of pixels. An
// image fills the low corner of its frame, and the rest of the frame gets the fill
// value. The mask, (N, H, W), is 1 where there is an image.
//
// Workers count pieces of rows. Piece n is piece n % pieces of row y of an image, in
// all its channels, so that each pixel is read once.
#pragma once

#include <cstdint>

#include "core/boxes.h"
#include "core/host_device.h"
#include "core/image/math.h"

namespace pyparallel {

constexpr int kMaxChannels = 4;

// (C, h, w), or (h, w, C) if `channels_last`. `data` is null for images without pixels.
struct Image {
  const void* data;
  uint32_t height;
  uint32_t width : 31;
  uint32_t channels_last : 1;
};

static_assert(sizeof(Image) == 16, "a launch carries a thousand of them");

// The normalisation of one channel: (x - shift) / scale if the result must be exact,
// else x * scale + shift, rounded once. Pixels outside the image get `fill`. `inverse`
// is of `scale` (exact_inverse in math.h), or 0.
struct Level {
  float shift;
  float scale;
  float fill;
  float inverse;
};

// The levels of each channel.
struct Levels {
  float shift[kMaxChannels];
  float scale[kMaxChannels];
  float fill[kMaxChannels];
  float inverse[kMaxChannels];

  void set(int channel, const Level& level) {
    shift[channel] = level.shift;
    scale[channel] = level.scale;
    fill[channel] = level.fill;
    inverse[channel] = level.inverse;
  }
};

PP_HOST_DEVICE Level level_of(const Levels& levels, int channel) {
  return {levels.shift[channel], levels.scale[channel], levels.fill[channel],
          levels.inverse[channel]};
}

// Returns the levels that compute (x - mean) / std.
inline Level make_level(float mean, float std, float fill, bool exact) {
  if (exact) return {mean, std, fill, exact_inverse(mean, std)};
  const double scale = 1.0 / static_cast<double>(std);
  const double shift = -static_cast<double>(mean) / static_cast<double>(std);
  return {static_cast<float>(shift), static_cast<float>(scale), fill, 0};
}

// A view. Height and width are less than 2**31; there are 1 to kMaxChannels channels.
// `swapped`: channel c comes from channel C - 1 - c of an image.
struct ImageBatch {
  void* dst;
  uint8_t* mask;  // may be null
  const Image* images;
  int64_t num_images;
  Divisor height;
  int64_t width;
  int32_t channels;
  bool swapped;
  Divisor pieces;       // per row
  int64_t piece_width;  // columns
  Levels levels;
};

PP_HOST_DEVICE int64_t num_pieces(const ImageBatch& batch) {
  return batch.num_images * batch.height * batch.pieces;
}

// Cuts rows of more than `limit` columns into pieces of `limit` columns.
inline void cut_rows(ImageBatch* batch, int64_t limit) {
  batch->pieces = batch->width <= limit ? 1 : (batch->width - 1) / limit + 1;
  batch->piece_width = batch->width <= limit ? batch->width : limit;
}

// Returns the part of a batch for `count` images from number `first` on.
inline ImageBatch slice_images(const ImageBatch& batch, int64_t first, int64_t count,
                               int64_t itemsize) {
  ImageBatch slice = batch;
  const int64_t pixels = first * batch.height * batch.width;
  slice.dst = static_cast<uint8_t*>(batch.dst) + pixels * batch.channels * itemsize;
  if (batch.mask != nullptr) slice.mask = batch.mask + pixels;
  slice.images = batch.images + first;
  slice.num_images = count;
  return slice;
}

// One piece of a row: `count` columns from `first` on. The first `data` columns belong
// to the image.
struct ImageSpan {
  const Image* image;
  int64_t index;  // of the image
  int64_t y;
  int64_t first;
  int64_t count;
  int64_t data;
};

PP_HOST_DEVICE ImageSpan image_span(const ImageBatch& batch, const Image* images,
                                    int64_t piece) {
  const Division row = batch.pieces.divide(piece);
  const Division y = batch.height.divide(row.quotient);
  const int64_t first = row.remainder * batch.piece_width;
  const Image* image = images + y.quotient;
  const int64_t count = lesser(batch.width - first, batch.piece_width);
  int64_t data = 0;
  if (y.remainder < static_cast<int64_t>(image->height)) {
    data = greater(lesser(static_cast<int64_t>(image->width) - first, count), 0);
  }
  return {image, y.quotient, y.remainder, first, count, data};
}

// The pixels of one row, from a column on, in the order of the destination's channels.
template <typename Source>
struct Pixels {
  const Source* first;
  int32_t next_column;   // in elements
  int64_t next_channel;  // may be negative
};

template <typename Source>
PP_HOST_DEVICE Pixels<Source> pixels_at(const ImageBatch& batch, const Image& image,
                                        int64_t y, int64_t column) {
  const int64_t width = image.width;
  const int64_t plane = static_cast<int64_t>(image.height) * width;
  const int64_t channels = batch.channels;
  const int64_t row = y * width + column;
  const auto* data = static_cast<const Source*>(image.data);
  Pixels<Source> pixels{data + row, 1, plane};
  if (image.channels_last) pixels = {data + row * channels, batch.channels, 1};
  if (batch.swapped) {
    pixels.first += (channels - 1) * pixels.next_channel;
    pixels.next_channel = -pixels.next_channel;
  }
  return pixels;
}

}  // namespace pyparallel
