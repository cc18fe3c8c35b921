// Packing into slots: bounds, gaps, and any partition of the slab.
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "core/partition.h"
#include "core/slots.h"

namespace {

using namespace pyparallel;

void test_bounds_do_not_wrap() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  CHECK(slot_fits(0, 64, 64, &end) && end == 64);
  CHECK(slot_fits(64, 0, 64, &end) && end == 64);
  CHECK(!slot_fits(1, 64, 64, &end));
  CHECK(!slot_fits(kMax, 1, 64, &end));
  CHECK(!slot_fits(kMax - 1, kMax - 1, kMax, &end));
  CHECK(slot_ascends(0, 0) && !slot_ascends(-1, 0) && !slot_ascends(7, 8));
}

void test_slots_follow_one_another_at_cache_lines() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  int64_t next = 0;
  CHECK(next_slot(0, 0, &next) && next == 0);
  CHECK(next_slot(0, 1, &next) && next == 64);
  CHECK(next_slot(64, 64, &next) && next == 128);
  CHECK(next_slot(64, 65, &next) && next == 192);
  CHECK(!next_slot(0, kMax, &next) && !next_slot(kMax - 63, 64, &next));
  CHECK(is_aligned(0) && is_aligned(64) && !is_aligned(63) && !is_aligned(-1));
}

struct Packed {
  std::vector<std::vector<uint8_t>> leaves;
  std::vector<Slot> slots;
  std::vector<uint8_t> expected;
};

Packed make_packed(Random* random) {
  Packed packed;
  const int64_t num = random->between(0, 6);
  packed.leaves.resize(static_cast<size_t>(num));
  for (std::vector<uint8_t>& leaf : packed.leaves) {
    leaf.resize(static_cast<size_t>(random->between(0, 40)));
    for (uint8_t& byte : leaf) byte = static_cast<uint8_t>(random->next());
    packed.expected.resize(packed.expected.size() +
                           static_cast<size_t>(random->between(0, 9)));
    packed.slots.push_back({leaf.empty() ? nullptr : leaf.data(),
                            static_cast<int64_t>(packed.expected.size()),
                            static_cast<int64_t>(leaf.size())});
    packed.expected.insert(packed.expected.end(), leaf.begin(), leaf.end());
  }
  packed.expected.resize(packed.expected.size() +
                         static_cast<size_t>(random->between(0, 9)));
  return packed;
}

void check_packed(const Packed& packed, int64_t piece, int64_t workers, int lanes) {
  std::vector<uint8_t> slab(packed.expected.size(), 0xEE);
  const Pack body{slab.data(), static_cast<int64_t>(slab.size()), piece,
                  packed.slots.data(), static_cast<int64_t>(packed.slots.size())};
  for (int64_t worker = 0; worker < workers; ++worker) {
    for (int lane = 0; lane < lanes; ++lane) {
      const Rows strided{worker, body.num_pieces(), workers};
      const Rows share = partition(body.num_pieces(), workers, worker);
      body(lanes == 1 ? share : strided, Lane{lane, lanes});
    }
  }
  CHECK(slab == packed.expected);
}

void test_every_byte_is_a_leaf_or_zero() {
  Random random(2);
  for (int trial = 0; trial < 500; ++trial) {
    const Packed packed = make_packed(&random);
    for (int64_t piece : {1, 7, 64, 1000}) {
      for (int64_t workers : {1, 2, 5}) {
        for (int lanes : {1, 3, 32}) check_packed(packed, piece, workers, lanes);
      }
    }
  }
}

}  // namespace

int main() {
  test_bounds_do_not_wrap();
  test_slots_follow_one_another_at_cache_lines();
  test_every_byte_is_a_leaf_or_zero();
  return finish("slots");
}
