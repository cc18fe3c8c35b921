// A random ragged batch of images, and its result, computed value by value.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/image/job.h"
#include "core/image/math.h"

namespace pyparallel::testing {

using Bytes = std::vector<uint8_t>;

// The value of a half, by its definition.
inline double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline double bfloat16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return static_cast<double>(value);
}

// Searches the nearest of all values of sixteen bits. `infinity` has the bits of
// infinity, in place of `above`, the number after the largest finite one.
template <typename ValueOf>
uint16_t nearest(double x, uint16_t infinity, double above, const ValueOf& value_of) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  const auto value = [&](uint16_t bits) {
    return bits == infinity ? above : value_of(bits);
  };
  uint16_t low = 0;
  uint16_t high = infinity;
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (value(middle) <= magnitude ? low : high) = middle;
  }
  if (magnitude >= above) return sign | infinity;
  const double below = magnitude - value(low);
  const double beyond = value(high) - magnitude;
  const bool up = beyond < below || (beyond == below && (low & 1) != 0);
  return sign | (up ? high : low);
}

inline uint16_t nearest_half(double x) {
  return nearest(x, 0x7C00, 65536.0, half_value);
}

inline uint16_t nearest_bfloat16(double x) {
  return nearest(x, 0x7F80, std::ldexp(1.0, 128), bfloat16_value);
}

struct ImageCase {
  ImageJob job{};
  std::vector<Bytes> sources;  // each after the bytes of its misalignment
  std::vector<Image> images;
  float mean[kMaxChannels];
  float std[kMaxChannels];
  int64_t value_nbytes = 0;
  int64_t numel = 0;

  // Returns the source value of destination channel c, or nullopt outside the image.
  bool pixel(int64_t i, int64_t c, int64_t y, int64_t x, float* value) const {
    const Image& image = images[static_cast<size_t>(i)];
    if (y >= image.height || x >= image.width) return false;
    const int64_t channels = job.batch.channels;
    const int64_t from = job.batch.swapped ? channels - 1 - c : c;
    const int64_t w = image.width;
    const int64_t h = image.height;
    const int64_t at =
        image.channels_last ? (y * w + x) * channels + from : (from * h + y) * w + x;
    if (job.source == ImageSource::kByte) {
      *value = static_cast<const uint8_t*>(image.data)[at];
    } else {
      memcpy(value, static_cast<const uint8_t*>(image.data) + 4 * at, 4);
    }
    return true;
  }

  // Returns the bits of value (c, y, x) of image i, and those before rounding in
  // `float_bits`.
  uint32_t expected(int64_t i, int64_t c, int64_t y, int64_t x) const {
    float value = 0;
    if (pixel(i, c, y, x, &value)) {
      if (job.exact) {
        volatile float difference = value - mean[c];  // volatile: rounded to float
        value = difference / std[c];
      } else {
        const Levels& levels = job.batch.levels;
        value = std::fma(value, levels.scale[c], levels.shift[c]);
      }
    } else {
      value = job.batch.levels.fill[c];
    }
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    if (job.value == ImageValue::kHalf) return nearest_half(value);
    if (job.value == ImageValue::kBFloat16) return nearest_bfloat16(value);
    return bits;
  }

  int64_t offset(int64_t i, int64_t c, int64_t y, int64_t x) const {
    const ImageBatch& b = job.batch;
    return job.last ? ((i * b.height + y) * b.width + x) * b.channels + c
                    : ((i * b.channels + c) * b.height + y) * b.width + x;
  }

  // Return the bytes of the destination and of the mask.
  Bytes values() const {
    Bytes out(static_cast<size_t>(numel * value_nbytes));
    each([&](int64_t i, int64_t c, int64_t y, int64_t x) {
      const uint32_t bits = expected(i, c, y, x);
      memcpy(out.data() + offset(i, c, y, x) * value_nbytes, &bits,
             static_cast<size_t>(value_nbytes));
    });
    return out;
  }

  Bytes mask_bytes() const {
    Bytes out(static_cast<size_t>(numel / job.batch.channels));
    each([&](int64_t i, int64_t, int64_t y, int64_t x) {
      float value;
      const int64_t at = (i * job.batch.height + y) * job.batch.width + x;
      out[static_cast<size_t>(at)] = pixel(i, 0, y, x, &value);
    });
    return out;
  }

  template <typename Visit>
  void each(const Visit& visit) const {
    const ImageBatch& b = job.batch;
    for (int64_t i = 0; i < b.num_images; ++i) {
      for (int64_t c = 0; c < b.channels; ++c) {
        for (int64_t y = 0; y < b.height; ++y) {
          for (int64_t x = 0; x < b.width; ++x) visit(i, c, y, x);
        }
      }
    }
  }
};

template <typename Numbers>
void set_levels(ImageCase* made, Numbers* random) {
  for (int c = 0; c < made->job.batch.channels; ++c) {
    made->mean[c] = static_cast<float>(random->between(0, 2550)) / 10;
    const int64_t number = random->between(1, 904);
    made->std[c] = static_cast<float>(number) / 7;
    // Values that three operations cannot divide by, and a negative one.
    constexpr float kOdd[] = {1e-42f, 1e-30f, 1e30f, -3.5f};
    if (made->job.exact && number > 900) made->std[c] = kOdd[number - 901];
    const float fill = static_cast<float>(random->between(-900, 900)) / 8;
    const Level level = make_level(made->mean[c], made->std[c], fill, made->job.exact);
    made->job.batch.levels.set(c, level);
  }
}

// Makes images of at most this height and width, at any address that their items allow.
// The memory of each ends with its last item, so that a sanitizer reports reads beyond.
template <typename Numbers>
void add_images(ImageCase* made, Numbers* random) {
  const ImageBatch& b = made->job.batch;
  const int64_t itemsize = made->job.source == ImageSource::kByte ? 1 : 4;
  made->sources.resize(static_cast<size_t>(b.num_images));
  for (Bytes& source : made->sources) {
    const bool empty = random->between(0, 12) == 0;
    const int64_t h = empty ? random->between(0, 1) : random->between(1, b.height);
    const int64_t w = empty ? 0 : random->between((b.width + 1) / 2, b.width);
    const int64_t shift = random->between(0, 5) * itemsize;
    const int64_t numel = b.channels * h * w;
    source.resize(static_cast<size_t>(shift + numel * itemsize));
    source.shrink_to_fit();
    for (int64_t n = 0; n < numel; ++n) {
      uint8_t* to = source.data() + shift + n * itemsize;
      if (itemsize == 1) {
        *to = static_cast<uint8_t>(random->next());
      } else {
        const float value = static_cast<float>(random->between(-400000, 800000)) / 1024;
        memcpy(to, &value, sizeof(value));
      }
    }
    const void* data = numel == 0 ? nullptr : source.data() + shift;
    made->images.push_back({data, static_cast<uint32_t>(h),
                            static_cast<uint32_t>(w) & 0x7FFFFFFF,
                            static_cast<uint32_t>(random->between(0, 1))});
  }
}

template <typename Numbers>
void make_case(ImageCase* made, Numbers* random, int64_t num, int64_t max_height,
               int64_t max_width) {
  ImageJob& job = made->job;
  job.source = random->between(0, 2) > 0 ? ImageSource::kByte : ImageSource::kFloat;
  job.value = static_cast<ImageValue>(random->between(0, 2));
  job.exact = random->between(0, 1) == 0;
  job.batch.num_images = num;
  job.batch.channels =
      static_cast<int32_t>(random->between(0, 1) == 0 ? 3 : random->between(1, 4));
  job.batch.height = random->between(1, max_height);
  job.batch.width = random->between(1, max_width);
  if (random->between(0, 1) == 0) job.batch.width += -job.batch.width & 7;
  job.batch.swapped = random->between(0, 1) == 0;
  job.last = job.batch.channels > 1 && random->between(0, 1) == 0;
  made->value_nbytes = value_size(job);
  made->numel = num * job.batch.channels * job.batch.height * job.batch.width;
  set_levels(made, random);
  add_images(made, random);
  job.batch.images = made->images.data();
}

}  // namespace pyparallel::testing
