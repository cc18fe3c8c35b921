#include "ops/pad_copy.h"

#include <c10/util/Exception.h>

#include "core/box_plan.h"

namespace pyparallel::ops {
namespace {

constexpr Where kDst{"pad_copy", "dst"};

c10::IntArrayRef target_of(const Snapshot& dst) {
  return c10::IntArrayRef(dst.sizes).slice(1);
}

const Backend* backend_of(const Snapshot& dst) {
  const Backend* backend = find_backend(dst.device.type());
  TORCH_CHECK_NOT_IMPLEMENTED(backend != nullptr, kDst,
                              " must be on a device that this build knows, but is on ",
                              dst.device.str(), ". Use the pure Python backend.");
  return backend;
}

void check_dst(const Snapshot& dst, size_t num_samples, size_t fill_nbytes) {
  TORCH_CHECK_VALUE(!dst.sizes.empty(), kDst,
                    " must have at least 1 dimension, but has 0.");
  TORCH_CHECK_VALUE(dst.contiguous, kDst, " must be contiguous, but has strides ",
                    Tuple{dst.strides}, " for shape ", Tuple{dst.sizes}, ".");
  const auto num_rows = static_cast<uint64_t>(dst.sizes[0]);
  TORCH_CHECK_VALUE(num_samples == num_rows, "pad_copy: samples must have ", num_rows,
                    " entries, one for each row of dst, but has ", num_samples, ".");
  const auto itemsize = static_cast<uint64_t>(dst.itemsize);
  TORCH_CHECK_VALUE(fill_nbytes == itemsize || fill_nbytes == itemsize * num_rows,
                    "pad_copy: fills must have ", itemsize, " bytes, or ",
                    itemsize * num_rows, " for one fill per sample, but has ",
                    fill_nbytes, ".");
  check_storage(dst, kDst);
}

}  // namespace

PadCopyJob::PadCopyJob(const at::Tensor& dst, TensorRefs samples,
                       std::string_view fills)
    : fills_(fills) {
  take_snapshot(dst, kDst, &dst_);
  backend_ = backend_of(dst_);
  check_dst(dst_, samples.size(), fills.size());
  samples_.reserve(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    add_sample(*samples[i], static_cast<int64_t>(i));
  }
}

void PadCopyJob::add_sample(const at::Tensor& tensor, int64_t index) {
  const Where where{"pad_copy", "samples", index};
  Snapshot& sample = samples_.emplace_back();
  take_snapshot(tensor, where, &sample);
  TORCH_CHECK_TYPE(sample.dtype == dst_.dtype, where, " must have the dtype of dst, ",
                   dtype_name(dst_.dtype), ", but has ", dtype_name(sample.dtype),
                   ". Convert it first.");
  TORCH_CHECK_VALUE(sample.device == dst_.device, where,
                    " must be on the device of dst, ", dst_.device.str(),
                    ", but is on ", sample.device.str(), ". Move it first.");
  const c10::IntArrayRef target = target_of(dst_);
  TORCH_CHECK_VALUE(sample.sizes.size() == target.size(), where, " must have ",
                    target.size(), " dimensions, as the rows of dst, but has shape ",
                    Tuple{sample.sizes}, ".");
  for (size_t d = 0; d < target.size(); ++d) {
    TORCH_CHECK_VALUE(sample.sizes[d] <= target[d], where, " must have at most shape ",
                      Tuple{target}, ", but has shape ", Tuple{sample.sizes}, ".");
  }
  check_storage(sample, where);
  if (sample.contiguous) check_apart(sample, dst_, where);
}

void PadCopyJob::run() {
  if (dst_.nbytes == 0) return;
  const c10::IntArrayRef target = target_of(dst_);
  const int64_t itemsize = dst_.itemsize;
  PadShapes shapes{itemsize, target.vec(), {}, {}};
  shapes.sizes.reserve(samples_.size() * target.size());
  shapes.sources.reserve(samples_.size());
  const char* fill = fills_.data();
  const bool one_fill = static_cast<int64_t>(fills_.size()) == itemsize;
  for (Snapshot& sample : samples_) {
    shapes.sizes.insert(shapes.sizes.end(), sample.sizes.begin(), sample.sizes.end());
    shapes.sources.push_back(
        {contiguous_bytes(&sample, *backend_), repeat_fill(fill, itemsize)});
    if (!one_fill) fill += itemsize;
  }
  const BoxPlan plan(dst_.mutable_data(), shapes);
  backend_->pad_copy(plan.table(), dst_.device);
}

}  // namespace pyparallel::ops
