#include "pad_copy_check.h"

#include "check.h"
#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "cpu/stream.h"
#include "destination.h"
#include "workers.h"

namespace pyparallel::testing {
namespace {

template <typename Word, typename Mover>
void check_every_worker(const BoxTable& table, Destination* dst, const Bytes& expected,
                        const PadRuns& runs) {
  const PadCopy<Word, Mover> body{table};
  for (int64_t threads : runs.threads) {
    dst->clear();
    run_threads(body, num_pieces(table), threads);
    CHECK(dst->holds(expected));
  }
  if (static_cast<int>(sizeof(Word)) > common_word(table)) return;
  for (int64_t warps : runs.warps) {
    for (int lanes : runs.lanes) {
      dst->clear();
      run_warps(body, num_pieces(table), warps, lanes);
      CHECK(dst->holds(expected));
    }
  }
}

template <typename Mover>
void check_plan(const BoxPlan& plan, Destination* dst, const Bytes& expected,
                const PadRuns& runs) {
  if (plan.empty()) {
    CHECK(expected.empty() && dst->holds(expected));
    return;
  }
  for (int64_t limit : runs.limits) {
    BoxTable table = plan.table();
    cut_rows(&table.frame, limit);
    CHECK(num_bytes(table) == static_cast<int64_t>(expected.size()));
    for (int64_t word : runs.words) {
      const auto check = [&](auto kind) {
        check_every_worker<decltype(kind), Mover>(table, dst, expected, runs);
      };
      if (word == 1) check(uint8_t{});
      if (word == 2) check(uint16_t{});
      if (word == 4) check(uint32_t{});
      if (word == 8) check(uint64_t{});
      if (word == 16) check(Word16{});
    }
  }
}

}  // namespace

void check_batch(const Batch& batch, int64_t shift, const PadRuns& runs) {
  Destination dst(batch.nbytes(), shift);
  const BoxPlan plan(dst.data(), batch.shapes);
  const Bytes expected = padded_slowly(batch);
  check_plan<CachedMover>(plan, &dst, expected, runs);
  cpu::visit_lines([&](auto lines) {
    check_plan<cpu::StreamMover<decltype(lines)>>(plan, &dst, expected, runs);
    return false;
  });
  if (batch.shapes.target.empty()) return;
  for (size_t num_dims : {size_t{1}, batch.shapes.target.size()}) {
    const Bytes marked = marked_slowly(batch, num_dims);
    Destination mask(static_cast<int64_t>(marked.size()), shift);
    const PadShapes shapes = mask_shapes(batch.shapes, mask.data(), num_dims);
    const BoxPlan mask_plan(mask.data(), shapes);
    check_plan<MarkMover>(mask_plan, &mask, marked, runs);
  }
}

}  // namespace pyparallel::testing
