#include "pad_copy_check.h"

#include "check.h"
#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/short_rows.h"
#include "cpu/nontemporal.h"
#include "destination.h"
#include "watched.h"
#include "workers.h"

namespace pyparallel::testing {
namespace {

struct WatchedMover : CachedWriter {
  template <typename Item>
  static Item read(const Item* from) {
    Watched::check(from, sizeof(Item));
    return *from;
  }
};

template <typename RowWriter>
void check_threads(const BoxTable& table, Destination* dst, const Bytes& expected,
                   const PadRuns& runs) {
  for (int64_t threads : runs.threads) {
    dst->clear();
    run_threads(PadCopy<RowWriter>{table}, num_pieces(table), threads);
    CHECK(dst->holds(expected));
  }
}

template <typename RowWriter>
void check_warps(const BoxTable& table, Destination* dst, const Bytes& expected,
                 const PadRuns& runs) {
  for (int64_t warps : runs.warps) {
    for (int lanes : runs.lanes) {
      dst->clear();
      run_warps(PadCopy<RowWriter>{table}, num_pieces(table), warps, lanes);
      CHECK(dst->holds(expected));
    }
  }
}

template <typename RowWriter>
void check_short_rows(const BoxTable& table, Destination* dst, const Bytes& expected,
                      const PadRuns& runs) {
  if (table.frame.pieces != 1 || !has_whole_items(table)) return;
  const ShortRows<RowWriter> body{table};
  for (int64_t warps : runs.warps) {
    for (int lanes : runs.lanes) {
      dst->clear();
      run_warps(body, body.num_groups(lanes), warps, lanes);
      CHECK(dst->holds(expected));
    }
  }
}

template <typename Check>
void check_plan(const BoxPlan& plan, Destination* dst, const Bytes& expected,
                const PadRuns& runs, const Check& check) {
  if (plan.empty()) {
    CHECK(expected.empty() && dst->holds(expected));
    return;
  }
  for (int64_t limit : runs.limits) {
    BoxTable table = plan.table();
    cut_rows(&table.frame, limit);
    CHECK(num_bytes(table) == static_cast<int64_t>(expected.size()));
    check(table);
  }
}

}  // namespace

void check_batch(const Batch& batch, int64_t shift, const PadRuns& runs) {
  Destination dst(batch.nbytes(), shift);
  const BoxPlan plan(dst.data(), batch.shapes);
  const Bytes expected = padded_slowly(batch);
  Watched::forget();
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const uint8_t* data = batch.shapes.sources[i].data;
    const Bytes& sample = batch.samples[i];
    if (data != nullptr) Watched::allow(data, sample.data() + sample.size() - data);
  }
  check_plan(plan, &dst, expected, runs, [&](const BoxTable& table) {
    check_threads<CachedWriter>(table, &dst, expected, runs);
    check_warps<WatchedMover>(table, &dst, expected, runs);
    check_short_rows<WatchedMover>(table, &dst, expected, runs);
    cpu::visit_lines([&](auto lines) {
      check_threads<cpu::NontemporalWriter<decltype(lines)>>(table, &dst, expected,
                                                             runs);
      return false;
    });
  });
  if (batch.shapes.target.empty()) return;
  for (size_t num_dims : {size_t{1}, batch.shapes.target.size()}) {
    const Bytes marked = marked_slowly(batch, num_dims);
    Destination mask(static_cast<int64_t>(marked.size()), shift);
    const PadShapes shapes = mask_shapes(batch.shapes, mask.data(), num_dims);
    const BoxPlan mask_plan(mask.data(), shapes);
    check_plan(mask_plan, &mask, marked, runs, [&](const BoxTable& table) {
      check_threads<MaskWriter>(table, &mask, marked, runs);
      check_warps<MaskWriter>(table, &mask, marked, runs);
      check_short_rows<MaskWriter>(table, &mask, marked, runs);
    });
  }
}

}  // namespace pyparallel::testing
