#include "cpu/launch.h"

#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/partition.h"
#include "cpu/parallel_for.h"

namespace pyparallel::cpu {
namespace {

// Rows this wide are cut so that threads share them evenly; still long enough for
// memcpy to run at its best.
constexpr int64_t kPieceBytes = 64 * 1024;

constexpr Lane kAlone{0, 1};

}  // namespace

void pad_copy(BoxTable table, BoxTable mask) {
  const int64_t workers = num_workers(num_bytes(table) + num_bytes(mask));
  if (workers > 1) {
    cut_rows(&table.frame, kPieceBytes);
    cut_rows(&mask.frame, kPieceBytes);
  }
  const PadCopy<uint8_t> body{table};
  const PadCopy<uint8_t, MarkMover> mark{mask};
  const int64_t pieces = num_pieces(table);
  const int64_t mask_pieces = num_pieces(mask);
  parallel_for(workers, [&](int64_t worker) {
    body(partition(pieces, workers, worker), kAlone);
    mark(partition(mask_pieces, workers, worker), kAlone);
  });
}

void pack(Pack body) {
  const int64_t workers = num_workers(body.nbytes);
  body.piece = kPieceBytes;
  const int64_t pieces = body.num_pieces();
  parallel_for(workers, [&](int64_t worker) {
    body(partition(pieces, workers, worker), kAlone);
  });
}

}  // namespace pyparallel::cpu
