#include <cuda_runtime.h>

#include <cstring>

#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/rows.h"
#include "cuda/pad_copy.h"

namespace pyparallel::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kThreadsPerBlock = 256;
constexpr int kWarpsPerBlock = kThreadsPerBlock / kWarpSize;
// Fills any GPU several times over; warps stride over the rows that are left.
constexpr int64_t kMaxBlocks = 16 * 1024;
// Words that one warp moves before it works out where its next row is.
constexpr int64_t kWordsPerPiece = kWarpSize * 16;

// A body with its boxes and starts inside, for the launch's parameters.
template <typename Body>
struct Inline {
  Body body;
  int64_t starts_at;  // in bytes; 0 without starts
  alignas(16) unsigned char bytes[kParameterBytes];

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

// One warp is one worker: its lanes share a row.
template <typename Body>
__global__ void __launch_bounds__(kThreadsPerBlock)
    run_body(const __grid_constant__ Body body, int64_t num_rows) {
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarpSize;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  body(Rows{warp, num_rows, num_warps},
       Lane{static_cast<int>(threadIdx.x % kWarpSize), kWarpSize});
}

// The one place that launches.
template <typename Body>
cudaError_t launch(const Body& body, int64_t num_rows, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  const int64_t blocks = lesser((num_rows - 1) / kWarpsPerBlock + 1, kMaxBlocks);
  run_body<<<static_cast<unsigned>(blocks), kThreadsPerBlock, 0, stream>>>(body,
                                                                           num_rows);
  return cudaGetLastError();
}

template <typename Word, typename Mover>
cudaError_t launch_pad_copy(BoxTable table, cudaStream_t stream) {
  using Body = PadCopy<Word, Mover>;
  static_assert(sizeof(Inline<Body>) + sizeof(int64_t) <= 4096);
  cut_rows(&table.frame, kWordsPerPiece * static_cast<int64_t>(sizeof(Word)));
  const int64_t num_rows = num_pieces(table);
  if (!fits_parameters(table)) return launch(Body{table}, num_rows, stream);
  Inline<Body> body{{table}, 0, {}};
  const auto boxes = static_cast<size_t>(box_nbytes(table));
  memcpy(body.bytes, table.boxes, boxes);
  if (table.starts != nullptr) {
    body.starts_at = box_nbytes(table);
    memcpy(body.bytes + boxes, table.starts, static_cast<size_t>(start_nbytes(table)));
  }
  return launch(body, num_rows, stream);
}

template <typename Mover>
cudaError_t launch_words(BoxTable table, int word, cudaStream_t stream) {
  switch (word) {
    case 1:
      return launch_pad_copy<uint8_t, Mover>(table, stream);
    case 2:
      return launch_pad_copy<uint16_t, Mover>(table, stream);
    case 4:
      return launch_pad_copy<uint32_t, Mover>(table, stream);
    case 8:
      return launch_pad_copy<uint64_t, Mover>(table, stream);
    case 16:
      return launch_pad_copy<Word16, Mover>(table, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t pad_copy(BoxTable table, int word, Writes writes, cudaStream_t stream) {
  if (writes == Writes::kMarks) return launch_words<MarkMover>(table, word, stream);
  return launch_words<CachedMover>(table, word, stream);
}

}  // namespace pyparallel::cuda
