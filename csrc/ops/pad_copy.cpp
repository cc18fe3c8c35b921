#include "ops/pad_copy.h"

#include <c10/util/Exception.h>

#include "ops/cast.h"
#include "ops/mask.h"

namespace pyparallel::ops {
namespace {

constexpr Where kPadDst{"pad_copy", "dst"};
constexpr Where kPadMask{"pad_copy", "mask"};

c10::IntArrayRef target_of(const Snapshot& dst) {
  return c10::IntArrayRef(dst.sizes).slice(1);
}

void check_dst(const Snapshot& dst, size_t num_samples, size_t fill_nbytes) {
  TORCH_CHECK_VALUE(!dst.sizes.empty(), kPadDst,
                    " must have at least 1 dimension, but has 0.");
  TORCH_CHECK_VALUE(dst.contiguous, kPadDst, " must be contiguous, but has strides ",
                    Tuple{dst.strides}, " for shape ", Tuple{dst.sizes}, ".");
  const auto num_rows = static_cast<uint64_t>(dst.sizes[0]);
  TORCH_CHECK_VALUE(num_samples == num_rows, "pad_copy: samples must have ", num_rows,
                    " entries, one for each row of dst, but has ", num_samples, ".");
  const auto itemsize = static_cast<uint64_t>(dst.itemsize);
  TORCH_CHECK_VALUE(fill_nbytes == itemsize || fill_nbytes == itemsize * num_rows,
                    "pad_copy: fills must have ", itemsize, " bytes, or ",
                    itemsize * num_rows, " for one fill per sample, but has ",
                    fill_nbytes, ".");
  check_storage(dst, kPadDst);
}

// Compares a start without an addition, because a start from outside may overflow.
void check_start(const c10::DimVector& start, const Snapshot& sample,
                 c10::IntArrayRef target, int64_t index) {
  const Where where{"pad_copy", "starts", index};
  TORCH_CHECK_VALUE(start.size() == target.size(), where, " must have ", target.size(),
                    " entries, one for each dimension of a row of dst, but has ",
                    start.size(), ".");
  for (size_t d = 0; d < target.size(); ++d) {
    TORCH_CHECK_VALUE(start[d] >= 0, where, " must have no negative entry, but is ",
                      Tuple{start}, ".");
  }
  for (size_t d = 0; d < target.size(); ++d) {
    TORCH_CHECK_VALUE(start[d] <= target[d] - sample.sizes[d], where,
                      " must leave room for shape ", Tuple{sample.sizes}, " in shape ",
                      Tuple{target}, ", but is ", Tuple{start}, ".");
  }
}

// Returns true if a mask has the first and one or more of the last dimensions of dst.
bool mask_fits(c10::IntArrayRef mask, c10::IntArrayRef dst) {
  if (mask.size() < 2 || mask.size() > dst.size() || mask[0] != dst[0]) return false;
  return mask.slice(1) == dst.slice(dst.size() - mask.size() + 1);
}

}  // namespace

PadCopyJob::PadCopyJob(const at::Tensor& dst, TensorRefs samples,
                       std::string_view fills, const PadPlaces& places)
    : fills_(fills) {
  take_snapshot(dst, kPadDst, &dst_);
  backend_ = backend_of(dst_, kPadDst);
  check_dst(dst_, samples.size(), fills.size());
  samples_.reserve(samples.size());
  if (!samples.empty() && backend_->cast_copy != nullptr) {
    cast_ = cast_of(samples.front()->scalar_type(), dst_.dtype);
  }
  source_dtype_ = cast_ != Cast::kNone ? samples.front()->scalar_type() : dst_.dtype;
  for (size_t i = 0; i < samples.size(); ++i) {
    add_sample(*samples[i], static_cast<int64_t>(i));
  }
  if (places.starts) add_starts(*places.starts);
  if (places.mask != nullptr) add_mask(*places.mask);
}

void PadCopyJob::add_sample(const at::Tensor& tensor, int64_t index) {
  const Where where{"pad_copy", "samples", index};
  Snapshot& sample = samples_.emplace_back();
  take_snapshot(tensor, where, &sample);
  TORCH_CHECK_TYPE(sample.dtype == source_dtype_, where, " must have the dtype of ",
                   cast_ == Cast::kNone ? "dst" : "samples[0]", ", ",
                   dtype_name(source_dtype_), ", but has ", dtype_name(sample.dtype),
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

void PadCopyJob::add_starts(const std::vector<c10::DimVector>& starts) {
  TORCH_CHECK_VALUE(starts.size() == samples_.size(), "pad_copy: starts must have ",
                    samples_.size(), " entries, one for each sample, but has ",
                    starts.size(), ".");
  for (size_t i = 0; i < starts.size(); ++i) {
    check_start(starts[i], samples_[i], target_of(dst_), static_cast<int64_t>(i));
    starts_.insert(starts_.end(), starts[i].begin(), starts[i].end());
  }
}

void PadCopyJob::add_mask(const at::Tensor& tensor) {
  Snapshot& mask = mask_.emplace();
  take_snapshot(tensor, kPadMask, &mask);
  check_mask_kind(mask, dst_, kPadMask);
  TORCH_CHECK_VALUE(mask_fits(mask.sizes, dst_.sizes), kPadMask,
                    " must have the first and one or more of the last dimensions of "
                    "dst, ",
                    Tuple{dst_.sizes}, ", but has shape ", Tuple{mask.sizes}, ".");
  check_mask_memory(mask, kPadMask);
  check_mask_apart(mask, kPadMask, dst_, kPadDst);
  for (size_t i = 0; i < samples_.size(); ++i) {
    const Where where{"pad_copy", "samples", static_cast<int64_t>(i)};
    if (samples_[i].contiguous) check_mask_apart(mask, kPadMask, samples_[i], where);
  }
}

PadShapes PadCopyJob::collect_shapes() {
  const c10::IntArrayRef target = target_of(dst_);
  const int64_t itemsize = dst_.itemsize;
  PadShapes shapes{itemsize, target.vec(),       {},
                   {},       std::move(starts_), source_ratio(cast_)};
  shapes.sizes.reserve(samples_.size() * target.size());
  shapes.sources.reserve(samples_.size());
  const char* item = fills_.data();
  const bool one_fill = static_cast<int64_t>(fills_.size()) == itemsize;
  Fill fill = repeat_fill(item, itemsize);
  for (Snapshot& sample : samples_) {
    shapes.sizes.insert(shapes.sizes.end(), sample.sizes.begin(), sample.sizes.end());
    shapes.sources.push_back({contiguous_bytes(&sample, *backend_), fill});
    if (one_fill || &sample == &samples_.back()) continue;
    item += itemsize;
    fill = repeat_fill(item, itemsize);
  }
  return shapes;
}

void PadCopyJob::run() {
  if (nbytes() == 0) return;
  const PadShapes shapes = collect_shapes();
  const BoxPlan plan(dst_.mutable_data(), shapes);
  if (!mask_ || mask_->nbytes == 0) {
    copy(plan.table(), kNoBoxes);
    return;
  }
  uint8_t* const mask_data = mask_->mutable_data();
  const PadShapes masked = mask_shapes(shapes, mask_data, mask_->sizes.size() - 1);
  const BoxPlan mask_plan(mask_data, masked);
  copy(plan.table(), mask_plan.table());
}

void PadCopyJob::copy(const BoxTable& table, const BoxTable& mask) const {
  if (cast_ == Cast::kNone) {
    backend_->pad_copy(table, mask, dst_.device);
  } else {
    backend_->cast_copy(table, mask, cast_);
  }
}

}  // namespace pyparallel::ops
