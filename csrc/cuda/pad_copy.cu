#include <cstring>

#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/short_rows.h"
#include "cuda/launch.cuh"
#include "cuda/pad_copy.h"

namespace pyparallel::cuda {
namespace {

// The bytes of a piece of a wide row. A warp spends about as much on finding a piece as
// on 1 KiB. Pieces of small batches have a single round of reads, so that they
// occupy the whole GPU. 32 MiB in larger pieces occupy 4096 warps, 32 on each of 128
// multiprocessors.
constexpr int64_t kSmallPiece = kWordsAhead * kWarpSize * kWordBytes;
constexpr int64_t kLargePiece = 4 * kSmallPiece;
constexpr int64_t kLargeBatch = 4096 * kLargePiece;

// Up to this number of bytes, a row costs lanes that share it more than its items do.
constexpr int64_t kShortRow = 1024;

// Half of the warps of a multiprocessor, with 64 registers per lane. Their reads ahead,
// up to 64 KiB, exceed the bytes that memory delivers during one latency.
constexpr int kMinBlocks = 4;

// A body and its boxes and starts, as parameters of a launch.
template <typename Body, int64_t num_bytes>
struct Inline {
  Body body;
  int64_t starts_at;  // in bytes; 0 without starts
  alignas(16) unsigned char bytes[num_bytes];

  __device__ void operator()(Rows rows, Lane lane) const {
    Body local = body;
    local.table.boxes = reinterpret_cast<const Box*>(bytes);
    local.table.starts = nullptr;
    if (starts_at > 0) {
      local.table.starts = reinterpret_cast<const Start*>(bytes + starts_at);
    }
    local(rows, lane);
  }
};

// The parameters of a launch beside boxes and starts. 4 KiB have room for 82 boxes, or
// 54 with starts; the larger size for 679 or 452.
constexpr int64_t kOtherBytes = 160;
constexpr int64_t kFew = kFewBytes - kOtherBytes;
constexpr int64_t kMany = (kManyBytes - kOtherBytes) / 16 * 16;

int64_t box_nbytes(const BoxTable& table) {
  return table.num_boxes * static_cast<int64_t>(sizeof(Box));
}

int64_t table_nbytes(const BoxTable& table) {
  const int64_t starts = table.starts == nullptr ? 0 : table.num_boxes;
  return box_nbytes(table) + starts * static_cast<int64_t>(sizeof(Start));
}

// Few lanes share a short row, so that a warp finds the places of several rows at once.
// A lane has up to four words of a row, which it reads before it stores one.
constexpr int kFewLanes = 4;
constexpr int kSomeLanes = 16;

constexpr int64_t most_nbytes(int lanes) { return kWordsAhead * kWordBytes * lanes; }

template <typename Whole, typename RowWriter>
cudaError_t launch_body(const Whole& body, const ShortRows<RowWriter>& rows,
                        cudaStream_t stream) {
  return launch<kMinBlocks>(body, rows.num_groups(kWarpSize), stream);
}

template <typename Whole, typename RowWriter>
cudaError_t launch_body(const Whole& body, const PadCopy<RowWriter>& rows,
                        cudaStream_t stream) {
  const int64_t num_rows = num_pieces(rows.table);
  const int64_t width = rows.table.frame.piece_width;
  if (width <= most_nbytes(kFewLanes)) {
    return launch<kMinBlocks, kFewLanes>(body, num_rows, stream);
  }
  if (width <= most_nbytes(kSomeLanes)) {
    return launch<kMinBlocks, kSomeLanes>(body, num_rows, stream);
  }
  return launch<kMinBlocks>(body, num_rows, stream);
}

template <typename Body, int64_t num_bytes>
cudaError_t launch_inline(const BoxTable& table, cudaStream_t stream) {
  using Whole = Inline<Body, num_bytes>;
  static_assert(sizeof(Whole) + sizeof(int64_t) <=
                (num_bytes == kFew ? kFewBytes : kManyBytes));
  Whole body{{table}, 0, {}};
  const auto boxes = static_cast<size_t>(box_nbytes(table));
  memcpy(body.bytes, table.boxes, boxes);
  if (table.starts != nullptr) {
    body.starts_at = box_nbytes(table);
    memcpy(body.bytes + boxes, table.starts,
           static_cast<size_t>(table_nbytes(table)) - boxes);
  }
  return launch_body(body, body.body, stream);
}

// A launch has at most `most` boxes.
template <typename Body>
cudaError_t launch_slices(const BoxTable& table, int64_t most, cudaStream_t stream) {
  const bool many = table_nbytes(table) > kFew && takes_many_bytes();
  const int64_t each = table_nbytes(slice_boxes(table, 0, 1));
  const int64_t limit = lesser((many ? kMany : kFew) / each, most);
  for (int64_t first = 0; first < table.num_boxes; first += limit) {
    const BoxTable slice =
        slice_boxes(table, first, lesser(limit, table.num_boxes - first));
    const cudaError_t error = table_nbytes(slice) <= kFew
                                  ? launch_inline<Body, kFew>(slice, stream)
                                  : launch_inline<Body, kMany>(slice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename RowWriter>
cudaError_t launch_rows(BoxTable table, cudaStream_t stream) {
  const int64_t most = kMostShortRows / num_bytes(slice_boxes(table, 0, 1));
  if (table.frame.width <= kShortRow && most > 0 && has_whole_items(table)) {
    return launch_slices<ShortRows<RowWriter>>(table, most, stream);
  }
  cut_rows(&table.frame, num_bytes(table) < kLargeBatch ? kSmallPiece : kLargePiece);
  return launch_slices<PadCopy<RowWriter>>(table, table.num_boxes, stream);
}

}  // namespace

cudaError_t pad_copy(const BoxTable& table, Writes writes, cudaStream_t stream) {
  if (table.num_boxes == 0) return cudaSuccess;
  if (writes == Writes::kMask) return launch_rows<MaskWriter>(table, stream);
  return launch_rows<CachedWriter>(table, stream);
}

}  // namespace pyparallel::cuda
