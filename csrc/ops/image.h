#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/image/job.h"
#include "ops/backend.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// The conversion of pixels to values: one number per channel.
struct ImageNormalization {
  std::vector<float> mean;
  std::vector<float> std;
  std::vector<float> fill;
  bool swap_channels = false;
  bool exact = false;
};

// Writes image i, normalised, into the low corner of dst[i] and fills the rest. The
// constructor checks all arguments and needs the GIL. run() needs no lock and uses only
// the snapshots of the constructor (Note: [read once]).
class ImageBatchJob {
 public:
  // `mask` may be null.
  ImageBatchJob(const at::Tensor& dst, TensorRefs images, const at::Tensor* mask,
                const ImageNormalization& normalization);

  // Returns the number of bytes that run() writes.
  int64_t nbytes() const { return num_bytes(job_); }
  // Returns true if run() calls no driver.
  bool on_host() const { return dst_.device.is_cpu(); }

  // On a GPU this queues the work on the current stream: the images must not be
  // written by another stream before it is done.
  void run();

 private:
  void check_dst(size_t num_images);
  void set_levels(const ImageNormalization& normalization);
  void add_image(const at::Tensor& tensor, int64_t index);
  void add_mask(const at::Tensor& tensor);

  Snapshot dst_;
  std::optional<Snapshot> mask_;
  const Backend* backend_ = nullptr;
  std::vector<Snapshot> images_;
  std::vector<Image> table_;
  ImageJob job_{};
};

}  // namespace pyparallel::ops
