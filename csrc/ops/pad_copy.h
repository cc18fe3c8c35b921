#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {

// Copies sample i into the low corner of dst[i] and fills the rest of dst[i] with a bit
// pattern. Constructing checks everything and needs the GIL; run() needs no lock, may
// be called once, and touches only what the constructor saw (Note: [read once]).
class PadCopyJob {
 public:
  // `fills` holds one item of dst's item size, or one for each sample.
  PadCopyJob(const at::Tensor& dst, TensorRefs samples, std::string_view fills);

  // Bytes that run() writes.
  int64_t nbytes() const { return dst_.nbytes; }

  // On a GPU this queues the copy on the current stream: the samples must not be
  // written by another stream before it is done.
  void run();

 private:
  void add_sample(const at::Tensor& sample, int64_t index);

  Snapshot dst_;
  const Backend* backend_ = nullptr;
  std::vector<Snapshot> samples_;
  std::string fills_;
};

}  // namespace pyparallel::ops
