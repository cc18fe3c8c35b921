#include "ops/image.h"

#include <c10/util/Exception.h>

#include "core/checked.h"
#include "ops/mask.h"

namespace pyparallel::ops {
namespace {

constexpr Where kImageDst{"image_batch", "dst"};
constexpr Where kImageMask{"image_batch", "mask"};
constexpr int64_t kLimit = int64_t{1} << 31;

// Returns true if (N, C, H, W), or (C, H, W), has its channels last, without gaps.
bool is_channels_last(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const size_t channel = sizes.size() - 3;
  const size_t from[] = {0, channel + 1, channel + 2, channel};
  const size_t skipped = channel == 0 ? 1 : 0;
  int64_t moved_sizes[4];
  int64_t moved_strides[4];
  for (size_t d = skipped; d < 4; ++d) {
    moved_sizes[d] = sizes[from[d]];
    moved_strides[d] = strides[from[d]];
  }
  return is_contiguous(moved_sizes + skipped, moved_strides + skipped,
                       static_cast<int64_t>(sizes.size()));
}

void check_start(const Snapshot& snapshot, const Where& where) {
  const auto address = reinterpret_cast<uintptr_t>(snapshot.data());
  const uint64_t past = address % static_cast<uint64_t>(snapshot.itemsize);
  TORCH_CHECK_VALUE(past == 0, where, " must start at a multiple of ",
                    snapshot.itemsize, " bytes, the item size of ",
                    dtype_name(snapshot.dtype), ", but starts ", past,
                    " bytes behind one.");
}

ImageValue value_of(const Snapshot& dst) {
  TORCH_CHECK_TYPE(
      dst.dtype == c10::kFloat || dst.dtype == c10::kHalf ||
          dst.dtype == c10::kBFloat16,
      kImageDst,
      " must have dtype torch.float32, torch.float16 or torch.bfloat16, but has ",
      dtype_name(dst.dtype), ".");
  if (dst.dtype == c10::kFloat) return ImageValue::kFloat;
  return dst.dtype == c10::kHalf ? ImageValue::kHalf : ImageValue::kBFloat16;
}

}  // namespace

ImageBatchJob::ImageBatchJob(const at::Tensor& dst, TensorRefs images,
                             const at::Tensor* mask,
                             const ImageNormalization& normalization) {
  take_snapshot(dst, kImageDst, &dst_);
  backend_ = backend_of(dst_, kImageDst);
  check_dst(images.size());
  set_levels(normalization);
  images_.reserve(images.size());
  table_.reserve(images.size());
  for (size_t i = 0; i < images.size(); ++i) {
    add_image(*images[i], static_cast<int64_t>(i));
  }
  if (mask != nullptr) add_mask(*mask);
}

void ImageBatchJob::check_dst(size_t num_images) {
  job_.value = value_of(dst_);
  const Tuple shape{dst_.sizes};
  TORCH_CHECK_VALUE(dst_.sizes.size() == 4, kImageDst,
                    " must have 4 dimensions, (N, C, H, W), but has shape ", shape,
                    ".");
  TORCH_CHECK_VALUE(dst_.sizes[1] >= 1 && dst_.sizes[1] <= kMaxChannels, kImageDst,
                    " must have 1 to 4 channels, but has shape ", shape, ".");
  TORCH_CHECK_VALUE(dst_.sizes[2] < kLimit && dst_.sizes[3] < kLimit, kImageDst,
                    " must be smaller than 2**31 in height and width, but has shape ",
                    shape, ".");
  job_.last = !dst_.contiguous && is_channels_last(dst_.sizes, dst_.strides);
  TORCH_CHECK_VALUE(dst_.contiguous || job_.last, kImageDst,
                    " must be contiguous or channels_last, but has strides ",
                    Tuple{dst_.strides}, " for shape ", shape, ".");
  const auto num = static_cast<uint64_t>(dst_.sizes[0]);
  TORCH_CHECK_VALUE(num_images == num, "image_batch: images must have ", num,
                    " entries, one for each image of dst, but has ", num_images, ".");
  check_storage(dst_, kImageDst);
  check_start(dst_, kImageDst);
  job_.batch.num_images = dst_.sizes[0];
  job_.batch.channels = static_cast<int32_t>(dst_.sizes[1]);
  job_.batch.height = dst_.sizes[2];
  job_.batch.width = dst_.sizes[3];
}

void ImageBatchJob::set_levels(const ImageNormalization& normalization) {
  const auto channels = static_cast<size_t>(job_.batch.channels);
  const std::pair<const char*, const std::vector<float>*> each[] = {
      {"mean", &normalization.mean},
      {"std", &normalization.std},
      {"fill", &normalization.fill}};
  for (const auto& [name, values] : each) {
    TORCH_CHECK_VALUE(values->size() == channels, "image_batch: ", name, " must have ",
                      channels, " entries, one for each channel, but has ",
                      values->size(), ".");
  }
  for (size_t c = 0; c < channels; ++c) {
    job_.batch.levels.set(static_cast<int>(c),
                          make_level(normalization.mean[c], normalization.std[c],
                                     normalization.fill[c], normalization.exact));
  }
  job_.batch.swapped = normalization.swap_channels;
  job_.exact = normalization.exact;
}

void ImageBatchJob::add_image(const at::Tensor& tensor, int64_t index) {
  const Where where{"image_batch", "images", index};
  Snapshot& image = images_.emplace_back();
  take_snapshot(tensor, where, &image);
  TORCH_CHECK_TYPE(image.dtype == c10::kByte || image.dtype == c10::kFloat, where,
                   " must have dtype torch.uint8 or torch.float32, but has ",
                   dtype_name(image.dtype), ". Convert it first.");
  TORCH_CHECK_TYPE(image.dtype == images_[0].dtype, where,
                   " must have the dtype of images[0], ", dtype_name(images_[0].dtype),
                   ", but has ", dtype_name(image.dtype), ". Convert it first.");
  TORCH_CHECK_VALUE(image.device == dst_.device, where,
                    " must be on the device of dst, ", dst_.device.str(),
                    ", but is on ", image.device.str(), ". Move it first.");
  const Tuple shape{image.sizes};
  TORCH_CHECK_VALUE(image.sizes.size() == 3, where,
                    " must have 3 dimensions, (C, h, w), but has shape ", shape, ".");
  const ImageBatch& batch = job_.batch;
  TORCH_CHECK_VALUE(image.sizes[0] == batch.channels, where, " must have ",
                    batch.channels, " channels, as dst, but has shape ", shape, ".");
  TORCH_CHECK_VALUE(image.sizes[1] <= batch.height && image.sizes[2] <= batch.width,
                    where, " must have at most height ", batch.height, " and width ",
                    batch.width, ", but has shape ", shape, ".");
  const bool last = !image.contiguous && is_channels_last(image.sizes, image.strides);
  TORCH_CHECK_VALUE(image.contiguous || last, where,
                    " must be contiguous, or a permuted view of contiguous (h, w, C), "
                    "but has strides ",
                    Tuple{image.strides}, " for shape ", shape,
                    ". Call contiguous() on it first.");
  check_storage(image, where);
  check_start(image, where);
  check_apart(image, dst_, where);
  job_.source = image.dtype == c10::kByte ? ImageSource::kByte : ImageSource::kFloat;
  table_.push_back({image.data(), static_cast<uint32_t>(image.sizes[1]),
                    static_cast<uint32_t>(image.sizes[2]) & 0x7FFFFFFF, last});
}

void ImageBatchJob::add_mask(const at::Tensor& tensor) {
  Snapshot& mask = mask_.emplace();
  take_snapshot(tensor, kImageMask, &mask);
  check_mask_kind(mask, dst_, kImageMask);
  const ImageBatch& batch = job_.batch;
  const c10::DimVector wanted{batch.num_images, batch.height, batch.width};
  TORCH_CHECK_VALUE(mask.sizes == wanted, kImageMask, " must have shape ",
                    Tuple{wanted}, ", one entry for each pixel of dst, but has shape ",
                    Tuple{mask.sizes}, ".");
  check_mask_memory(mask, kImageMask);
  check_mask_apart(mask, kImageMask, dst_, kImageDst);
  for (size_t i = 0; i < images_.size(); ++i) {
    check_mask_apart(mask, kImageMask, images_[i],
                     {"image_batch", "images", static_cast<int64_t>(i)});
  }
}

void ImageBatchJob::run() {
  if (nbytes() == 0) return;
  job_.batch.dst = dst_.mutable_data();
  job_.batch.mask = mask_ ? mask_->mutable_data() : nullptr;
  job_.batch.images = table_.data();
  backend_->image_batch(job_, dst_.device);
}

}  // namespace pyparallel::ops
