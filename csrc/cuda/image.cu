#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "core/image/lanes.h"
#include "cuda/image.h"
#include "cuda/launch.cuh"

namespace pyparallel::cuda {
namespace {

// While the last pieces of a batch run, most multiprocessors have no work. On an H100,
// with 4224 warps at a time, 16,384 pieces of whole rows left it idle for 11% of the
// time. So rows are cut until there are about eight pieces per warp. In four groups of
// float32 the lanes of a warp have 512 columns, and smaller pieces would take as long.
constexpr int64_t kMostColumns = 4096;
constexpr int64_t kFewestColumns = 512;
constexpr int64_t kEnoughPieces = 32768;

int64_t quotient_up(int64_t n, int64_t d) { return (n - 1) / d + 1; }

// Returns the columns of the pieces of a row: equal, but for the last one.
int64_t piece_columns(const ImageBatch& batch) {
  const int64_t num_rows = batch.num_images * batch.height;
  int64_t pieces = quotient_up(kEnoughPieces, num_rows);
  pieces = lesser(pieces, quotient_up(batch.width, kFewestColumns));
  pieces = greater(pieces, quotient_up(batch.width, kMostColumns));
  constexpr int64_t kLine = 64;  // of columns, so that pieces start alike
  return quotient_up(quotient_up(batch.width, pieces), kLine) * kLine;
}

// Blocks per multiprocessor. They leave 64 or 80 registers per lane, which is enough.
// Half or three eighths of all warps, with their reads ahead, saturate the memory.
template <RowLayout layout>
constexpr int kMinBlocks = layout == RowLayout::kPlanesOfPixels ? 3 : 4;

struct DeviceMath {
  __device__ static float subtract(float a, float b) { return __fsub_rn(a, b); }
  __device__ static float multiply(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float divide(float a, float b) { return __fdiv_rn(a, b); }
  __device__ static float multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }

  __device__ static float round(float value, float) { return value; }
  __device__ static Half round(float value, Half) {
    return {__half_as_ushort(__float2half_rn(value))};
  }
  __device__ static BFloat16 round(float value, BFloat16) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
  }

  __device__ static uint32_t pair(float low, float high, Half) {
    return word_of(__floats2half2_rn(low, high));
  }
  __device__ static uint32_t pair(float low, float high, BFloat16) {
    return word_of(__floats2bfloat162_rn(low, high));
  }
  template <typename Pair>
  __device__ static uint32_t word_of(Pair pair) {
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }

  __device__ static uint32_t bits(float value) { return __float_as_uint(value); }

  template <typename Item>
  __device__ static Item load(const Item* from) {
    return __ldg(from);
  }
  __device__ static void load_four(const float* from, float* to) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }

  // An intrinsic, because the compiler may split an assignment into two or four stores.
  __device__ static void store(void* to, const uint32_t (&words)[4]) {
    __stwb(static_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
  }
};

// A batch and its table of images, as parameters of a launch.
template <typename Body, int num_images>
struct Inline {
  ImageBatch batch;
  Image images[num_images];

  __device__ void operator()(Rows rows, Lane lane) const {
    Body{batch, images}(rows, lane);
  }
};

// The number of images in the parameters of a small launch, beside the other
// parameters.
constexpr int64_t kOtherBytes = 160;
constexpr int64_t kFew =
    (kFewBytes - kOtherBytes) / static_cast<int64_t>(sizeof(Image));
constexpr int64_t kMany = kManyBytes > kFewBytes ? 1000 : kFew;

template <typename Body, int64_t num_images>
cudaError_t launch_inline(const ImageBatch& batch, cudaStream_t stream) {
  using Whole = Inline<Body, static_cast<int>(num_images)>;
  static_assert(sizeof(Whole) + sizeof(int64_t) <=
                (num_images == kFew ? kFewBytes : kManyBytes));
  Whole body{batch, {}};
  memcpy(body.images, batch.images,
         static_cast<size_t>(batch.num_images) * sizeof(Image));
  return launch<kMinBlocks<Body::kLayout>>(body, num_pieces(batch), stream);
}

template <typename Body>
cudaError_t launch_slices(ImageBatch batch, int64_t itemsize, cudaStream_t stream) {
  cut_rows(&batch, piece_columns(batch));
  const int64_t num = batch.num_images;
  const int64_t limit = num > kFew && takes_many_bytes() ? kMany : kFew;
  for (int64_t first = 0; first < num; first += limit) {
    const int64_t count = lesser(limit, num - first);
    const ImageBatch slice = slice_images(batch, first, count, itemsize);
    const cudaError_t error = count <= kFew ? launch_inline<Body, kFew>(slice, stream)
                                            : launch_inline<Body, kMany>(slice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <RowLayout layout>
using LayoutConstant = std::integral_constant<RowLayout, layout>;

template <typename Source, typename Value, bool exact>
cudaError_t launch_job(const ImageJob& job, cudaStream_t stream) {
  const auto launch_layout = [&](auto layout) {
    using Body = ImageLanes<Source, Value, exact, decltype(layout)::value, DeviceMath>;
    return launch_slices<Body>(job.batch, sizeof(Value), stream);
  };
  const RowLayout rows = row_layout(job);
  if (rows == RowLayout::kPixels)
    return launch_layout(LayoutConstant<RowLayout::kPixels>{});
  if constexpr (sizeof(Source) == 1) {
    constexpr RowLayout kFused = RowLayout::kPlanesOfPixels;
    if (rows == kFused) return launch_layout(LayoutConstant<kFused>{});
  }
  return launch_layout(LayoutConstant<RowLayout::kPlanes>{});
}

}  // namespace

cudaError_t image_batch(const ImageJob& job, cudaStream_t stream) {
  return visit_types(job, [&](auto source, auto value) {
    using Source = decltype(source);
    using Value = decltype(value);
    return job.exact ? launch_job<Source, Value, true>(job, stream)
                     : launch_job<Source, Value, false>(job, stream);
  });
}

}  // namespace pyparallel::cuda
