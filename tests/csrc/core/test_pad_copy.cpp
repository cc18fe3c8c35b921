// The body of pad-copy, as CPU threads and as CUDA warps run it, against an oracle.
#include <cstdint>
#include <vector>

#include "batch.h"
#include "check.h"
#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/short_rows.h"
#include "destination.h"
#include "pad_copy_check.h"
#include "workers.h"

namespace {

using namespace pyparallel;
using testing::Batch;

// An address and a width that 16 does not divide, in one piece and in the pieces of a
// GPU: edges, single words, and more words than a lane reads ahead.
TEST(test_rows_of_every_alignment_and_width) {
  Random random(7);
  testing::PadRuns runs;
  runs.limits = {int64_t{1} << 40, 2048};
  runs.threads = {1};
  runs.warps = {2};
  for (int64_t shift = 0; shift < 16; ++shift) {
    for (int64_t limit : {15, 33, 48, 80, 600, 2100, 4500}) {
      for (int64_t itemsize : {1, 4}) {
        const int64_t width = random.between(limit / 2, limit) / itemsize + 1;
        const bool placed = random.between(0, 1) == 0;
        const Batch batch = testing::make_batch(&random, {2, 2, width}, 2, itemsize,
                                                random.between(0, 1) == 0, placed);
        testing::check_batch(batch, shift / itemsize * itemsize, runs);
      }
    }
  }
}

// Words of one row, of several rows, and of several samples.
TEST(test_words_of_short_rows) {
  Random random(3);
  testing::PadRuns runs;
  runs.limits = {int64_t{1} << 40};
  runs.threads = {};
  int num_taken = 0;
  for (int64_t width : {1, 2, 3, 5, 7, 31, 75}) {
    for (int64_t itemsize : {1, 4, 8}) {
      for (int64_t run = 0; run < 12; ++run) {
        const bool placed = run % 2 == 0;
        const Batch batch = testing::make_batch(&random, {2, 3, 5, width}, 3, itemsize,
                                                run % 3 == 0, placed);
        const int64_t shift = random.between(0, 15) / itemsize * itemsize;
        testing::check_batch(batch, shift, runs);
        testing::Destination dst(batch.nbytes(), shift);
        num_taken += has_whole_items(BoxPlan(dst.data(), batch.shapes).table()) ? 1 : 0;
      }
    }
  }
  CHECK(num_taken >= 50);
}

TEST(test_slices_of_boxes_make_the_whole) {
  Random random(2);
  for (bool placed : {false, true}) {
    const Batch batch = testing::make_batch(&random, {3, 4, 9}, 7, 4, false, placed);
    testing::Destination dst(batch.nbytes());
    const BoxPlan plan(dst.data(), batch.shapes);
    for (int64_t each : {1, 3, 7}) {
      dst.clear();
      for (int64_t first = 0; first < 7; first += each) {
        const int64_t count = lesser(each, 7 - first);
        const BoxTable part = slice_boxes(plan.table(), first, count);
        testing::run_warps(PadCopy<>{part}, num_pieces(part), 2, 3);
      }
      CHECK(dst.holds(padded_slowly(batch)));
    }
  }
}

TEST(test_dimensions_that_no_sample_pads_merge) {
  for (bool placed : {false, true}) {
    uint8_t byte = 0;
    PadShapes shapes{1, {2, 3, 8, 9, 4}, {2, 3, 8, 5, 4}, {{&byte, {}}}, {}};
    if (placed) shapes.starts = {0, 0, 0, 2, 0};
    const BoxPlan plan(&byte, shapes);
    const BoxTable table = plan.table();
    CHECK(table.num_boxes == 1);
    CHECK(table.frame.height == 2 * 3 * 8 && table.frame.width == 9 * 4);
    CHECK(table.frame.depth == 1 && table.frame.planes == 1);
    CHECK(table.boxes[0].width == 5 * 4 && table.boxes[0].height == 48);
    if (!placed) continue;
    CHECK(table.starts[0].x == 2 * 4);
    CHECK(table.starts[0].y == 0 && table.starts[0].z == 0);
  }
}

}  // namespace
