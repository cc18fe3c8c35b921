// An image batch together with the types of its memory: the request to a device.
#pragma once

#include <cstdint>

#include "core/image/layout.h"
#include "core/image/math.h"

namespace pyparallel {

enum class ImageSource { kByte, kFloat };
enum class ImageValue { kFloat, kHalf, kBFloat16 };

// `last`: the destination is (N, H, W, C); with one channel that is (N, C, H, W).
struct ImageJob {
  ImageBatch batch;
  ImageSource source;
  ImageValue value;
  bool last;
  bool exact;
};

inline int64_t value_size(const ImageJob& job) {
  return job.value == ImageValue::kFloat ? 4 : 2;
}

// Returns the size of dst and mask together.
inline int64_t num_bytes(const ImageJob& job) {
  const ImageBatch& batch = job.batch;
  const int64_t each = batch.channels * value_size(job) + (batch.mask != nullptr);
  return batch.num_images * batch.height * batch.width * each;
}

// The rows of the destination and of some images. With 1 channel: planes.
enum class RowLayout {
  kPlanes,          // (N, C, H, W)
  kPlanesOfPixels,  // (N, 3, H, W), with images that are bytes (h, w, 3)
  kPixels           // (N, H, W, C)
};

inline RowLayout row_layout(const ImageJob& job) {
  const ImageBatch& batch = job.batch;
  if (job.last) return RowLayout::kPixels;
  const bool fused = batch.channels == 3 && job.source == ImageSource::kByte;
  for (int64_t i = 0; i < batch.num_images && fused; ++i) {
    if (batch.images[i].channels_last) return RowLayout::kPlanesOfPixels;
  }
  return RowLayout::kPlanes;
}

// Returns visit(Source{}, Value{}) for the types of the job.
template <typename Visit>
auto visit_types(const ImageJob& job, const Visit& visit) {
  const auto visit_values = [&](auto source) {
    if (job.value == ImageValue::kFloat) return visit(source, float{});
    if (job.value == ImageValue::kHalf) return visit(source, Half{});
    return visit(source, BFloat16{});
  };
  if (job.source == ImageSource::kByte) return visit_values(uint8_t{});
  return visit_values(float{});
}

}  // namespace pyparallel
