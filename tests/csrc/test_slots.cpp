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

// Leaves of up to `most` bytes behind gaps of up to `gap`. Slots start at multiples of
// `unit`; if that is not 1, the leaves themselves start anywhere.
Packed make_packed(Random* random, int64_t most, int64_t gap, int64_t unit) {
  Packed packed;
  const int64_t num = random->between(0, 6);
  const auto extend = [&](int64_t nbytes) {
    const int64_t end = static_cast<int64_t>(packed.expected.size()) + nbytes;
    packed.expected.resize(static_cast<size_t>((end + unit - 1) / unit * unit));
  };
  packed.leaves.resize(static_cast<size_t>(num));
  for (std::vector<uint8_t>& memory : packed.leaves) {
    const int64_t nbytes = random->between(0, most);
    const int64_t shift = unit == 1 ? 0 : random->between(0, 15);
    // Exactly as large as it is read: the sanitizers see the first byte beyond.
    memory.resize(static_cast<size_t>(shift + nbytes));
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random->next());
    extend(random->between(0, gap));
    packed.slots.push_back({nbytes == 0 ? nullptr : memory.data() + shift,
                            static_cast<int64_t>(packed.expected.size()), nbytes});
    packed.expected.insert(packed.expected.end(), memory.begin() + shift, memory.end());
  }
  extend(random->between(0, gap));
  return packed;
}

constexpr uint8_t kUntouched = 0xEE;

// Aligned as a device's memory is, with bytes on both sides that nobody may write.
struct Slab {
  explicit Slab(int64_t nbytes)
      : words(static_cast<size_t>(nbytes / 16 + 3), Filled{}), size(nbytes) {}

  struct Filled : Word16 {
    Filled() : Word16{~0ull / 255 * kUntouched, ~0ull / 255 * kUntouched} {}
  };

  uint8_t* data() { return reinterpret_cast<uint8_t*>(words.data() + 1); }
  bool equals(const std::vector<uint8_t>& expected) {
    bool equal = static_cast<int64_t>(expected.size()) == size;
    for (int64_t i = 0; equal && i < size; ++i) {
      equal = data()[i] == expected[static_cast<size_t>(i)];
    }
    for (int64_t i = 1; i <= 16; ++i) {
      equal = equal && data()[-i] == kUntouched && data()[size + i - 1] == kUntouched;
    }
    return equal;
  }

  std::vector<Filled> words;
  int64_t size;
};

void run(const Pack& body, int64_t workers, int lanes) {
  for (int64_t worker = 0; worker < workers; ++worker) {
    for (int lane = 0; lane < lanes; ++lane) {
      const Rows strided{worker, body.num_pieces(), workers};
      const Rows share = partition(body.num_pieces(), workers, worker);
      body(lanes == 1 ? share : strided, Lane{lane, lanes});
    }
  }
}

Pack body_of(const Packed& packed, Slab* slab, int64_t piece) {
  return {slab->data(), slab->size, piece, packed.slots.data(),
          static_cast<int64_t>(packed.slots.size())};
}

void test_a_lone_lane_writes_a_leaf_or_zero() {
  Random random(2);
  for (int trial = 0; trial < 500; ++trial) {
    const Packed packed = make_packed(&random, 40, 9, 1);
    for (int64_t piece : {1, 7, 64, 1000}) {
      for (int64_t workers : {1, 2, 5}) {
        Slab slab(static_cast<int64_t>(packed.expected.size()));
        run(body_of(packed, &slab, piece), workers, 1);
        CHECK(slab.equals(packed.expected));
      }
    }
  }
}

void test_lanes_write_leaves_of_any_address_or_zero() {
  Random random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t most = trial % 3 == 0 ? 900 : 70;
    const Packed packed = make_packed(&random, most, 100, trial % 2 == 0 ? 64 : 16);
    for (int64_t piece : {16, 48, 64, 2048}) {
      for (int64_t workers : {1, 2, 5}) {
        for (int lanes : {2, 3, 32}) {
          Slab slab(static_cast<int64_t>(packed.expected.size()));
          run(body_of(packed, &slab, piece), workers, lanes);
          CHECK(slab.equals(packed.expected));
        }
      }
    }
  }
}

void test_slices_together_write_what_the_whole_writes() {
  Random random(4);
  for (int trial = 0; trial < 200; ++trial) {
    const Packed packed = make_packed(&random, 200, 100, 64);
    const auto num_slots = static_cast<int64_t>(packed.slots.size());
    for (int64_t most : {1, 2, 5, 100}) {
      Slab slab(static_cast<int64_t>(packed.expected.size()));
      const Pack whole = body_of(packed, &slab, 64);
      int64_t first = 0;
      int64_t end = 0;
      do {
        const Pack part = slice(whole, first, most);
        CHECK(part.begin == end && part.num_slots <= most);
        run(part, 3, 32);
        end = part.end;
        first += most;
      } while (first < num_slots);
      CHECK(end == whole.end && slab.equals(packed.expected));
    }
  }
}

}  // namespace

int main() {
  test_bounds_do_not_wrap();
  test_slots_follow_one_another_at_cache_lines();
  test_a_lone_lane_writes_a_leaf_or_zero();
  test_lanes_write_leaves_of_any_address_or_zero();
  test_slices_together_write_what_the_whole_writes();
  return finish("slots");
}
