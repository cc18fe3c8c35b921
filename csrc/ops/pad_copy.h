#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/box_plan.h"
#include "ops/backend.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// The places of samples in the rows of dst, and the mask of these places.
struct PadPlaces {
  // For each sample one start per dimension of a row. Without starts, all are 0.
  std::optional<std::vector<c10::DimVector>> starts;
  const at::Tensor* mask = nullptr;  // may be null
};

// Copies sample i to its place in dst[i] and fills the rest of dst[i] with a bit
// pattern. Samples of one other dtype are cast if there is a cast (ops/cast.h). The
// constructor checks all arguments and needs the GIL. run() needs no lock, may be
// called once, and uses only the snapshots of the constructor (Note: [read once]).
class PadCopyJob {
 public:
  // `fills` has one item of dst's item size, or one for each sample.
  PadCopyJob(const at::Tensor& dst, TensorRefs samples, std::string_view fills,
             const PadPlaces& places = {});

  // Returns the number of bytes that run() writes.
  int64_t nbytes() const { return dst_.nbytes + (mask_ ? mask_->nbytes : 0); }
  // Returns true if run() calls no driver.
  bool on_host() const { return dst_.device.is_cpu(); }

  // On a GPU this queues the copy on the current stream: the samples must not be
  // written by another stream before it is done.
  void run();

 private:
  void add_sample(const at::Tensor& sample, int64_t index);
  void add_starts(const std::vector<c10::DimVector>& starts);
  void add_mask(const at::Tensor& tensor);
  PadShapes collect_shapes();
  void copy(const BoxTable& table, const BoxTable& mask) const;

  Snapshot dst_;
  std::optional<Snapshot> mask_;
  const Backend* backend_ = nullptr;
  Cast cast_ = Cast::kNone;
  c10::ScalarType source_dtype_ = c10::ScalarType::Undefined;
  std::vector<Snapshot> samples_;
  std::vector<int64_t> starts_;  // one row for each sample, or empty
  std::string fills_;
};

}  // namespace pyparallel::ops
