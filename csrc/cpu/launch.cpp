#include "cpu/launch.h"

#include "core/box_plan.h"
#include "core/pad_copy.h"
#include "core/work.h"
#include "cpu/cache_size.h"
#include "cpu/cast.h"
#include "cpu/nontemporal.h"
#include "cpu/parallel_for.h"

namespace pyparallel::cpu {
namespace {

// Wider rows are cut into pieces of this size, so that threads share them evenly. The
// pieces are long enough for the full speed of memcpy.
constexpr int64_t kPieceBytes = 64 * 1024;

// Rows and leaves of fewer bytes are written faster through the caches, because each
// begins and ends within a line.
constexpr int64_t kMinNontemporalRow = 512;

constexpr Lane kSingleLane{0, 1};

template <typename RowWriter>
void run_pad_copy(const BoxTable& table, const BoxTable& mask, int64_t workers,
                  const RowWriter& writer) {
  const PadCopy<RowWriter> body{table};
  const PadCopy<MaskWriter> mask_body{mask};
  const int64_t pieces = num_pieces(table);
  const int64_t mask_pieces = num_pieces(mask);
  parallel_for(workers, [&](int64_t worker) {
    body.copy_runs(partition(pieces, workers, worker), writer);
    if (mask_pieces > 0)
      mask_body(partition(mask_pieces, workers, worker), kSingleLane);
  });
}

bool exceeds_cache(int64_t nbytes) { return nbytes > last_cache_bytes() / 2; }

// Calls visit() with a RowWriter.
template <typename Visit>
void with_row_writer(bool streamed, const Visit& visit) {
  const auto stream = [&](auto lines) {
    visit(NontemporalWriter<decltype(lines)>());
    return true;
  };
  if (!streamed || !visit_lines(stream)) visit(CachedWriter());
}

}  // namespace

bool is_nontemporal(const BoxTable& table) {
  return exceeds_cache(num_bytes(table)) && table.frame.width >= kMinNontemporalRow;
}

bool is_nontemporal(const Pack& body) {
  const int64_t nbytes = body.end - body.begin;
  return exceeds_cache(nbytes) && nbytes / kMinNontemporalRow >= body.num_slots;
}

void pad_copy(BoxTable table, BoxTable mask, Cast cast) {
  const int64_t workers = num_workers(num_bytes(table) + num_bytes(mask));
  const bool streamed = is_nontemporal(table);
  if (workers > 1) {
    cut_rows(&table.frame, kPieceBytes);
    cut_rows(&mask.frame, kPieceBytes);
  }
  with_row_writer(streamed, [&](auto writer) {
    if (cast == Cast::kNone) {
      run_pad_copy(table, mask, workers, writer);
    } else {
      const CastWriter<decltype(writer)> casting(cast_loops(), cast);
      run_pad_copy(table, mask, workers, casting);
    }
  });
}

void pack(Pack body) {
  const int64_t workers = num_workers(body.end);
  body.piece = kPieceBytes;
  const int64_t pieces = body.num_pieces();
  const auto run = [&](const auto& writer) {
    parallel_for(workers, [&](int64_t worker) {
      body.write_run(partition(pieces, workers, worker), writer);
    });
  };
  with_row_writer(is_nontemporal(body), [&](auto writer) {
    if (body.casts == nullptr) {
      run(writer);
    } else {
      run(CastWriter<decltype(writer)>(cast_loops()));
    }
  });
}

}  // namespace pyparallel::cpu
