// Sizes of any 64 bits: arithmetic against 128 bits, and plans larger than any memory.
#include <cstdint>
#include <vector>

#include "core/box_plan.h"
#include "core/checked.h"
#include "core/pack.h"
#include "core/work.h"
#include "fuzz.h"

namespace pyparallel::testing {
namespace {

using Wide = __int128;
using Sizes = std::vector<int64_t>;

bool fits(Wide number) { return number >= kMin64 && number <= kMax64; }

// Saturates just above the limit, because no result is ever subtracted.
Wide capped(Wide number) { return fits(number) ? number : Wide{kMax64} + 1; }

template <typename To>
void check_narrow(int64_t value) {
  To narrow{};
  const bool good = static_cast<Wide>(value) >= std::numeric_limits<To>::min() &&
                    static_cast<Wide>(value) <= std::numeric_limits<To>::max();
  CHECK(checked_narrow(value, &narrow) == good);
  CHECK(!good || static_cast<Wide>(narrow) == static_cast<Wide>(value));
}

void check_numbers(FuzzedNumbers* numbers) {
  const int64_t a = numbers->raw();
  const int64_t b = numbers->raw();
  int64_t result = 0;
  const Wide sum = Wide{a} + b;
  CHECK(checked_add(a, b, &result) == fits(sum) && (!fits(sum) || result == sum));
  const Wide times = Wide{a} * b;
  CHECK(checked_mul(a, b, &result) == fits(times) && (!fits(times) || result == times));
  check_narrow<int8_t>(a);
  check_narrow<uint8_t>(a);
  check_narrow<int32_t>(a);
  check_narrow<uint32_t>(a);
  check_narrow<uint64_t>(a);
}

Sizes draw_sizes(FuzzedNumbers* numbers, size_t num) {
  Sizes sizes(num);
  for (int64_t& size : sizes) size = numbers->raw();
  return sizes;
}

bool has(const Sizes& sizes, bool (*is)(int64_t)) {
  for (int64_t size : sizes) {
    if (is(size)) return true;
  }
  return false;
}

bool is_zero(int64_t size) { return size == 0; }
bool is_negative(int64_t size) { return size < 0; }

void check_shapes(FuzzedNumbers* numbers) {
  const auto num = static_cast<size_t>(numbers->between(0, 5));
  const Sizes sizes = draw_sizes(numbers, num);
  const Sizes strides = draw_sizes(numbers, num);
  const auto ndim = static_cast<int64_t>(num);
  const int64_t itemsize = int64_t{1} << numbers->between(0, 4);
  const int64_t offset = numbers->raw();
  const bool empty = has(sizes, is_zero);
  const bool negative = has(sizes, is_negative);
  Wide nbytes = itemsize;
  Wide numel = 1;
  Wide last = offset;
  bool row_major = true;
  for (size_t d = num; d-- > 0 && !empty && !negative;) {
    if (sizes[d] != 1) row_major &= strides[d] == numel;
    numel = capped(numel * sizes[d]);
    nbytes = capped(nbytes * sizes[d]);
    last = capped(last + capped(Wide{sizes[d] - 1} * strides[d]));
  }
  int64_t found = -1;
  const bool counted = checked_nbytes(sizes.data(), ndim, itemsize, &found);
  CHECK(counted == (!negative && (empty || fits(nbytes))));
  CHECK(!counted || found == (empty ? 0 : nbytes));

  found = -1;
  const bool good = offset >= 0 && !negative && !has(strides, is_negative);
  const Wide end = good ? capped((last + 1) * itemsize) : 0;
  const bool reached =
      checked_extent(sizes.data(), strides.data(), ndim, offset, itemsize, &found);
  CHECK(reached == (empty || (good && fits(end))));
  CHECK(!reached || found == (empty ? 0 : end));

  if (negative) return;
  CHECK(is_contiguous(sizes.data(), strides.data(), ndim) ==
        (empty || (row_major && fits(numel))));
}

void check_slots(FuzzedNumbers* numbers) {
  const int64_t offset = numbers->raw_size();
  const int64_t nbytes = numbers->raw_size();
  const int64_t slab = numbers->raw_size();
  const Wide end = Wide{offset} + nbytes;
  int64_t found = -1;
  CHECK(slot_fits(offset, nbytes, slab, &found) == (end <= slab));
  CHECK(end > slab || found == end);
  const int64_t aligned = offset - offset % kSlotAlignment;
  CHECK(is_aligned(aligned));
  // Checked arithmetic may refuse a result that only its last step would make fit.
  const Wide next = (Wide{aligned} + nbytes + 63) / 64 * 64;
  const bool good = fits(Wide{aligned} + nbytes + 63);
  CHECK(next_slot(aligned, nbytes, &found) == good && (!good || found == next));
}

void check_partition(FuzzedNumbers* numbers) {
  const int64_t items = numbers->raw_size();
  const int64_t workers = 1 + numbers->raw_size() % kMax64;
  const int64_t worker = numbers->raw_size() % workers;
  const Rows share = partition(items, workers, worker);
  const int64_t each = items / workers;
  CHECK(share.step == 1 && share.begin >= 0 && share.end <= items);
  CHECK(share.end - share.begin == each || share.end - share.begin == each + 1);
  CHECK(worker > 0 || share.begin == 0);
  CHECK(worker + 1 < workers || share.end == items);
  if (worker + 1 < workers) {
    CHECK(partition(items, workers, worker + 1).begin == share.end);
  }
}

// Shapes whose bytes fit 64 bits but no memory: addresses are computed, but not read.
struct Plannable {
  PadShapes shapes;
  std::vector<bool> padded;
  int64_t nbytes = 0;

  // False if the plan is invalid, or has too many boxes for this test.
  bool draw(FuzzedNumbers* numbers) {
    const auto ndim = static_cast<size_t>(numbers->between(0, 6));
    const int64_t num = numbers->between(1, 3);
    shapes.itemsize = int64_t{1} << numbers->between(0, 4);
    for (size_t d = 0; d < ndim; ++d) {
      padded.push_back(numbers->between(0, 1) == 0);
      const bool outer = d + 4 < ndim || (d + 3 < ndim && (padded[d] || d > 0));
      shapes.target.push_back(outer ? numbers->between(0, 4) : numbers->raw_size());
    }
    int64_t row = 0;
    if (!checked_nbytes(shapes.target.data(), static_cast<int64_t>(ndim),
                        shapes.itemsize, &row) ||
        !checked_mul(row, num, &nbytes)) {
      return false;
    }
    const bool placed = numbers->between(0, 1) == 0;
    for (int64_t i = 0; i < num; ++i) {
      for (size_t d = 0; d < ndim; ++d) {
        const int64_t target = shapes.target[d];
        const int64_t less =
            padded[d] ? numbers->raw_size() % (target + (target < kMax64)) : 0;
        shapes.sizes.push_back(target - less);
        if (placed) shapes.starts.push_back(numbers->between(0, less));
      }
      shapes.sources.push_back({base(), Fill{0, 0}});
    }
    return true;
  }

  static const uint8_t* base() { return reinterpret_cast<const uint8_t*>(4096); }
};

// One element of the destination: its row must find its place in the sample, or none.
void check_element(FuzzedNumbers* numbers, const Plannable& made,
                   const BoxTable& table) {
  const PadShapes& shapes = made.shapes;
  const size_t ndim = shapes.target.size();
  const auto num = static_cast<int64_t>(shapes.sources.size());
  const int64_t sample = numbers->between(0, num - 1);
  Wide element = sample;
  Wide source = 0;
  bool inside = true;
  for (size_t d = 0; d < ndim; ++d) {
    const size_t at = static_cast<size_t>(sample) * ndim + d;
    const int64_t start = shapes.starts.empty() ? 0 : shapes.starts[at];
    const int64_t edge = numbers->one_of({start, start + shapes.sizes[at], 0});
    const Wide near = Wide{edge} + numbers->between(-2, 2);
    const bool there = near >= 0 && near < shapes.target[d];
    const int64_t place =
        there ? static_cast<int64_t>(near) : numbers->between(0, shapes.target[d] - 1);
    element = element * shapes.target[d] + place;
    source = source * shapes.sizes[at] + (place - start);
    inside &= place >= start && place - start < shapes.sizes[at];
  }
  const auto byte = static_cast<int64_t>(element * shapes.itemsize);
  const Frame& frame = table.frame;
  const int64_t piece =
      byte / frame.width * frame.pieces + byte % frame.width / frame.piece_width;
  const RowSpan span = row_span(table, piece);
  const int64_t into = byte - span.offset;
  CHECK(into >= 0 && into < span.nbytes);
  CHECK((into >= span.lead && into < span.lead + span.copied) == inside);
  if (!inside) return;
  const auto found = reinterpret_cast<uintptr_t>(span.src + (into - span.lead));
  CHECK(found - 4096 == static_cast<uintptr_t>(source * shapes.itemsize));
}

// The pieces of a plan follow one another, and end with its last byte.
void check_piece(FuzzedNumbers* numbers, const BoxTable& table) {
  const int64_t num = num_pieces(table);
  const int64_t piece = numbers->raw_size() % num;
  const RowSpan span = row_span(table, piece);
  const int64_t end = span.offset + span.nbytes;
  CHECK(span.offset >= 0 && span.nbytes > 0 && span.lead >= 0 && span.copied >= 0);
  CHECK(span.lead + span.copied <= span.nbytes);
  CHECK(piece > 0 || span.offset == 0);
  CHECK(end ==
        (piece + 1 < num ? row_span(table, piece + 1).offset : num_bytes(table)));
}

void check_plan(FuzzedNumbers* numbers) {
  Plannable made;
  if (!made.draw(numbers)) return;
  uint8_t nothing = 0;
  const BoxPlan plan(&nothing, made.shapes);
  CHECK(plan.empty() == (made.nbytes == 0));
  if (plan.empty()) return;
  BoxTable table = plan.table();
  cut_rows(&table.frame, numbers->one_of({int64_t{1} << 40, 16, 48, 1 << 16}));
  CHECK(num_bytes(table) == made.nbytes);
  for (int turn = 0; turn < 4; ++turn) {
    check_element(numbers, made, table);
    check_piece(numbers, table);
  }
}

}  // namespace

void fuzz(FuzzedNumbers* numbers) {
  switch (numbers->between(0, 5)) {
    case 0:
      return check_numbers(numbers);
    case 1:
      return check_shapes(numbers);
    case 2:
      return check_slots(numbers);
    case 3:
      return check_partition(numbers);
    default:
      return check_plan(numbers);
  }
}

}  // namespace pyparallel::testing
