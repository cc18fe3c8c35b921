// Overflow-checked arithmetic, the partition of work, and row division.
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "core/boxes.h"
#include "core/checked.h"
#include "core/work.h"

namespace {

using namespace pyparallel;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(test_overflow_is_reported) {
  int64_t result = 0;
  CHECK(checked_add(kMax - 1, 1, &result) && result == kMax);
  CHECK(!checked_add(kMax, 1, &result));
  CHECK(checked_mul(int64_t{1} << 31, int64_t{1} << 31, &result));
  CHECK(result == int64_t{1} << 62);
  CHECK(!checked_mul(int64_t{1} << 32, int64_t{1} << 31, &result));
}

TEST(test_narrowing_keeps_the_value_or_fails) {
  uint32_t narrow = 0;
  CHECK(checked_narrow(int64_t{2}, &narrow) && narrow == 2);
  CHECK(!checked_narrow((int64_t{1} << 32) + 2, &narrow));
  CHECK(!checked_narrow(int64_t{-1}, &narrow));
}

TEST(test_nbytes_of_shapes) {
  int64_t nbytes = -1;
  CHECK(checked_nbytes(nullptr, 0, 16, &nbytes) && nbytes == 16);
  const int64_t plain[] = {2, 3, 4};
  CHECK(checked_nbytes(plain, 3, 4, &nbytes) && nbytes == 96);
  const int64_t huge[] = {int64_t{1} << 40, int64_t{1} << 23};
  CHECK(!checked_nbytes(huge, 2, 1, &nbytes));
  const int64_t huge_but_empty[] = {int64_t{1} << 40, int64_t{1} << 40, 0};
  CHECK(checked_nbytes(huge_but_empty, 3, 8, &nbytes) && nbytes == 0);
  const int64_t negative[] = {2, -1};
  CHECK(!checked_nbytes(negative, 2, 1, &nbytes));
}

TEST(test_extent_of_strided_tensors) {
  int64_t end = -1;
  const int64_t sizes[] = {3, 4};
  const int64_t rows[] = {4, 1};
  const int64_t expanded[] = {0, 1};
  const int64_t far[] = {kMax / 2, 1};
  CHECK(checked_extent(sizes, rows, 2, 5, 4, &end) && end == 17 * 4);
  CHECK(checked_extent(sizes, expanded, 2, 0, 1, &end) && end == 4);
  CHECK(!checked_extent(sizes, far, 2, 0, 4, &end));
  CHECK(!checked_extent(sizes, rows, 2, -1, 4, &end));
  const int64_t empty[] = {3, 0};
  CHECK(checked_extent(empty, far, 2, kMax, 16, &end) && end == 0);
}

TEST(test_contiguity_ignores_strides_of_single_places) {
  const int64_t sizes[] = {2, 1, 3};
  const int64_t loose[] = {3, 77, 1};
  const int64_t gapped[] = {4, 4, 1};
  CHECK(is_contiguous(sizes, loose, 3));
  CHECK(!is_contiguous(sizes, gapped, 3));
  CHECK(is_contiguous(nullptr, nullptr, 0));
}

TEST(test_partition_covers_every_item_once) {
  for (int64_t items : {0, 1, 2, 7, 64, 1000}) {
    for (int64_t workers : {1, 2, 3, 7, 64}) {
      int64_t next = 0;
      for (int64_t worker = 0; worker < workers; ++worker) {
        const Rows share = partition(items, workers, worker);
        CHECK(share.begin == next && share.step == 1);
        CHECK(share.end - share.begin >= items / workers);
        CHECK(share.end - share.begin <= items / workers + 1);
        next = share.end;
      }
      CHECK(next == items);
    }
  }
  CHECK(partition(kMax, 3, 2).end == kMax);
}

TEST(test_row_division_on_both_sides_of_32_bits) {
  const int64_t edges[] = {0,
                           1,
                           2,
                           3,
                           (int64_t{1} << 32) - 1,
                           int64_t{1} << 32,
                           (int64_t{1} << 32) + 1,
                           int64_t{1} << 40,
                           kMax};
  for (int64_t n : edges) {
    for (int64_t d : edges) {
      if (d == 0) continue;
      const Division result = divide_row(n, d);
      CHECK(result.quotient == n / d && result.remainder == n % d);
    }
  }
}

}  // namespace
