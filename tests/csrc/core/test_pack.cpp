// Packing into slots: bounds, gaps, and reads; fuzz_pack.cpp has lanes and slices.
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "core/pack.h"
#include "destination.h"
#include "packed.h"
#include "watched.h"
#include "workers.h"

namespace {

using namespace pyparallel;
using testing::Destination;
using testing::make_packed;
using testing::Packed;
using testing::Watched;

TEST(test_slots_follow_one_another_at_cache_lines) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  int64_t next = 0;
  CHECK(next_slot(0, 0, &next) && next == 0);
  CHECK(next_slot(0, 1, &next) && next == 64);
  CHECK(next_slot(64, 64, &next) && next == 128);
  CHECK(next_slot(64, 65, &next) && next == 192);
  CHECK(!next_slot(0, kMax, &next) && !next_slot(kMax - 63, 64, &next));
  CHECK(is_aligned(0) && is_aligned(64) && !is_aligned(63) && !is_aligned(-1));
}

TEST(test_a_lone_lane_writes_a_leaf_or_zero) {
  Random random(2);
  for (int trial = 0; trial < 500; ++trial) {
    const Packed packed = make_packed(&random, 40, 9, 1);
    for (int64_t piece : {1, 7, 64, 1000}) {
      for (int64_t workers : {1, 2, 5}) {
        Destination slab(packed.nbytes());
        const Pack body = packed.body(slab.data(), piece);
        testing::run_threads(body, body.num_pieces(), workers);
        CHECK(slab.holds(packed.expected));
      }
    }
  }
}

struct WatchedReader {
  template <typename Item>
  static Item read(const Item* from) {
    Watched::check(from, sizeof(Item));
    return *from;
  }
};

TEST(test_words_of_a_leaf_are_read_within_it) {
  Random random(5);
  alignas(16) uint8_t source[16 + 700];
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random.next());
  for (int64_t past = 0; past < 16; ++past) {
    for (int64_t nbytes : {1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100, 271, 700}) {
      const uint8_t* from = source + past;
      std::vector<uint8_t> expected(from, from + nbytes);
      expected.resize(static_cast<size_t>((nbytes + 15) / 16 * 16));
      Watched::forget();
      Watched::allow(from, nbytes);
      for (int lanes : {1, 2, 3, 32}) {
        Destination dst(static_cast<int64_t>(expected.size()));
        for (int lane = 0; lane < lanes; ++lane) {
          copy_words<WatchedReader>(dst.data(), from, nbytes, Lane{lane, lanes});
        }
        CHECK(dst.holds(expected));
      }
      for (int64_t at = 0; at < nbytes; ++at) {
        const Word16 word = word_of<WatchedReader>(from + at, from, from + nbytes);
        uint8_t bytes[kWordBytes];
        memcpy(bytes, &word, kWordBytes);
        for (int64_t b = 0; b < kWordBytes; ++b) {
          CHECK(bytes[b] == (at + b < nbytes ? from[at + b] : 0));
        }
      }
    }
  }
}

}  // namespace
