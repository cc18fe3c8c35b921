// The body of pad-copy, as CPU threads and as CUDA warps run it, against an oracle.
#include <cstdint>
#include <vector>

#include "batch.h"
#include "check.h"
#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/partition.h"
#include "cpu/stream.h"

namespace {

using namespace pyparallel;
using testing::Batch;
using testing::Bytes;

// Sixteen-byte aligned bytes with a guard on both sides, none of them written yet.
class Destination {
 public:
  explicit Destination(int64_t nbytes, int64_t shift = 0)
      : nbytes_(nbytes),
        words_(static_cast<size_t>(nbytes + shift) / 16 + 5),
        first_(32 + shift) {
    clear();
  }

  uint8_t* data() { return bytes() + first_; }

  void clear() { memset(bytes(), kUntouched, words_.size() * sizeof(Word16)); }

  bool holds(const Bytes& expected) {
    if (static_cast<int64_t>(expected.size()) != nbytes_) return false;
    if (nbytes_ > 0 && memcmp(data(), expected.data(), expected.size()) != 0) {
      return false;
    }
    const auto size = static_cast<int64_t>(words_.size() * sizeof(Word16));
    for (int64_t b = 0; b < size; ++b) {
      const bool guard = b < first_ || b >= first_ + nbytes_;
      if (guard && bytes()[b] != kUntouched) return false;
    }
    return true;
  }

 private:
  static constexpr uint8_t kUntouched = 0xEE;

  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(words_.data()); }

  int64_t nbytes_;
  std::vector<Word16> words_;
  int64_t first_;
};

// CPU threads: consecutive rows, one lane.
template <typename Word, typename Mover>
void run_threads(const BoxTable& table, int64_t num_threads) {
  const PadCopy<Word, Mover> body{table};
  const int64_t rows = num_pieces(table);
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    body(partition(rows, num_threads, thread), Lane{0, 1});
  }
}

// CUDA warps: strided rows, shared by lanes.
template <typename Word, typename Mover>
void run_warps(const BoxTable& table, int64_t num_warps, int num_lanes) {
  const PadCopy<Word, Mover> body{table};
  const int64_t rows = num_pieces(table);
  for (int64_t warp = 0; warp < num_warps; ++warp) {
    for (int lane = 0; lane < num_lanes; ++lane) {
      body(Rows{warp, rows, num_warps}, Lane{lane, num_lanes});
    }
  }
}

template <typename Word, typename Mover>
void check_every_worker(const BoxTable& table, Destination* dst,
                        const Bytes& expected) {
  for (int64_t threads : {1, 2, 3, 7}) {
    dst->clear();
    run_threads<Word, Mover>(table, threads);
    CHECK(dst->holds(expected));
  }
  if (static_cast<int>(sizeof(Word)) > common_word(table)) return;
  for (int64_t warps : {1, 2, 5}) {
    for (int lanes : {1, 2, 3, 32}) {
      dst->clear();
      run_warps<Word, Mover>(table, warps, lanes);
      CHECK(dst->holds(expected));
    }
  }
}

template <typename Mover>
void check_plan(const BoxPlan& plan, Destination* dst, const Bytes& expected) {
  if (plan.empty()) {
    CHECK(expected.empty() && dst->holds(expected));
    return;
  }
  for (int64_t limit : {int64_t{1} << 40, int64_t{64}, int64_t{16}}) {
    BoxTable table = plan.table();
    cut_rows(&table.frame, limit);
    CHECK(num_bytes(table) == static_cast<int64_t>(expected.size()));
    check_every_worker<uint8_t, Mover>(table, dst, expected);
    check_every_worker<uint16_t, Mover>(table, dst, expected);
    check_every_worker<uint32_t, Mover>(table, dst, expected);
    check_every_worker<uint64_t, Mover>(table, dst, expected);
    check_every_worker<Word16, Mover>(table, dst, expected);
  }
}

void check_batch(const Batch& batch, int64_t shift) {
  Destination dst(batch.nbytes(), shift);
  const BoxPlan plan(dst.data(), batch.shapes);
  const Bytes expected = padded_slowly(batch);
  check_plan<CachedMover>(plan, &dst, expected);
  cpu::visit_lines([&](auto lines) {
    check_plan<cpu::StreamMover<decltype(lines)>>(plan, &dst, expected);
    return false;
  });
  if (batch.shapes.target.empty()) return;
  for (size_t num_dims : {size_t{1}, batch.shapes.target.size()}) {
    const Bytes marked = marked_slowly(batch, num_dims);
    Destination mask(static_cast<int64_t>(marked.size()), shift);
    const PadShapes shapes = mask_shapes(batch.shapes, mask.data(), num_dims);
    const BoxPlan mask_plan(mask.data(), shapes);
    check_plan<MarkMover>(mask_plan, &mask, marked);
  }
}

void test_random_batches() {
  Random random(1);
  for (int trial = 0; trial < 600; ++trial) {
    std::vector<int64_t> target(static_cast<size_t>(random.between(0, 6)));
    const int64_t limit = target.size() > 3 ? 4 : 9;
    for (int64_t& size : target) {
      size = random.between(random.between(0, 30) == 0 ? 0 : 1, limit);
    }
    const int64_t itemsize = int64_t{1} << random.between(0, 4);
    const int64_t num = random.between(0, 4);
    const bool plain = random.between(0, 1) == 0;
    const bool placed = random.between(0, 1) == 0;
    const Batch batch =
        testing::make_batch(&random, target, num, itemsize, plain, placed);
    check_batch(batch, random.between(0, 64 / itemsize) * itemsize);
  }
}

void test_slices_of_boxes_make_the_whole() {
  Random random(2);
  for (bool placed : {false, true}) {
    const Batch batch = testing::make_batch(&random, {3, 4, 9}, 7, 4, false, placed);
    Destination dst(batch.nbytes());
    const BoxPlan plan(dst.data(), batch.shapes);
    for (int64_t each : {1, 3, 7}) {
      dst.clear();
      for (int64_t first = 0; first < 7; first += each) {
        const int64_t count = lesser(each, 7 - first);
        run_warps<uint32_t, CachedMover>(slice_boxes(plan.table(), first, count), 2, 3);
      }
      CHECK(dst.holds(padded_slowly(batch)));
    }
  }
}

BoxTable table_of(const BoxPlan& plan, size_t num_boxes) {
  CHECK(plan.table().num_boxes == static_cast<int64_t>(num_boxes));
  return plan.table();
}

void test_equal_shapes_become_one_row_each() {
  uint8_t byte = 0;
  PadShapes shapes{4, {3, 5, 7}, {3, 5, 7, 3, 5, 7}, {{&byte, {}}, {&byte, {}}}, {}};
  const BoxPlan plan(&byte, shapes);
  const BoxTable table = table_of(plan, 2);
  CHECK(num_rows(table) == 2 && table.frame.width == 3 * 5 * 7 * 4);
}

void test_dimensions_that_no_sample_pads_merge() {
  uint8_t byte = 0;
  PadShapes shapes{1, {2, 3, 8, 9, 4}, {2, 3, 8, 5, 4}, {{&byte, {}}}, {}};
  const BoxPlan plan(&byte, shapes);
  const BoxTable table = table_of(plan, 1);
  CHECK(table.frame.height == 2 * 3 * 8 && table.frame.width == 9 * 4);
  CHECK(table.frame.depth == 1 && table.frame.planes == 1);
  CHECK(table.boxes[0].width == 5 * 4 && table.boxes[0].height == 48);
}

void test_dimensions_without_padding_merge_beside_those_with_starts() {
  uint8_t byte = 0;
  PadShapes shapes{1, {2, 3, 8, 9, 4}, {2, 3, 8, 5, 4}, {{&byte, {}}}, {0, 0, 0, 2, 0}};
  const BoxPlan plan(&byte, shapes);
  const BoxTable table = table_of(plan, 1);
  CHECK(table.frame.height == 2 * 3 * 8 && table.frame.width == 9 * 4);
  CHECK(table.starts[0].x == 2 * 4);
  CHECK(table.starts[0].y == 0 && table.starts[0].z == 0);
}

void test_a_start_limits_the_word() {
  alignas(16) uint8_t bytes[64] = {};
  PadShapes shapes{4, {16}, {8}, {{bytes, {}}}, {}};
  const BoxPlan low(bytes, shapes);
  CHECK(common_word(low.table()) == 16);
  shapes.starts = {6};
  const BoxPlan placed(bytes, shapes);
  CHECK(common_word(placed.table()) == 8);
}

void test_sizes_beyond_32_bits_are_planned_exactly() {
  constexpr int64_t kWide = int64_t{3} << 31;
  uint8_t byte = 0;
  PadShapes shapes{2, {5, kWide}, {4, kWide - 1}, {{&byte, {}}}, {}};
  const BoxPlan plan(&byte, shapes);
  BoxTable table = table_of(plan, 1);
  CHECK(table.frame.width == 2 * kWide);
  CHECK(table.boxes[0].width == 2 * kWide - 2);
  cut_rows(&table.frame, 1 << 16);
  const RowSpan last = row_span(table, num_pieces(table) - 1);
  CHECK(last.offset + last.nbytes == 10 * kWide && last.copied == 0);
  const RowSpan copied = row_span(table, 4 * table.frame.pieces - 1);
  CHECK(copied.nbytes - copied.copied == 2);
  CHECK(copied.offset + copied.nbytes == 8 * kWide);
}

}  // namespace

int main() {
  test_random_batches();
  test_slices_of_boxes_make_the_whole();
  test_equal_shapes_become_one_row_each();
  test_dimensions_that_no_sample_pads_merge();
  test_dimensions_without_padding_merge_beside_those_with_starts();
  test_a_start_limits_the_word();
  test_sizes_beyond_32_bits_are_planned_exactly();
  return finish("pad_copy");
}
