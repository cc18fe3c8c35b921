// The writers that bypass the caches: every alignment, and the choice between them.
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/box_plan.h"
#include "core/pack.h"
#include "core/pad_copy.h"
#include "cpu/cache_size.h"
#include "cpu/launch.h"
#include "cpu/nontemporal.h"

namespace {

using namespace pyparallel;
using cpu::kLineBytes;

// One allocation of exactly these bytes, so that a sanitizer reports reads beyond them.
std::vector<uint8_t> random_bytes(Random* random, int64_t size) {
  std::vector<uint8_t> bytes(static_cast<size_t>(size));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random->next());
  bytes.shrink_to_fit();
  return bytes;
}

// Consecutive pieces, each a copy or a fill: the calls of one worker.
template <typename RowWriter>
void check_pieces(Random* random, int64_t alignment) {
  std::vector<uint8_t> expected;
  alignas(kLineBytes) uint8_t room[4096];
  memset(room, 0xEE, sizeof(room));
  uint8_t* const begin = room + kLineBytes + alignment;
  RowWriter writer;
  for (int64_t piece = random->between(0, 9); piece > 0; --piece) {
    const int64_t limit = random->between(0, 2) == 0 ? 300 : 70;
    const int64_t nbytes = random->between(1, limit);
    uint8_t* const to = begin + expected.size();
    if (random->between(0, 1) == 0) {
      const auto from = random_bytes(random, nbytes);
      writer.copy(to, from.data(), nbytes);
      expected.insert(expected.end(), from.begin(), from.end());
    } else {
      const Fill fill{random->next(), random->next()};
      writer.fill(to, nbytes, fill);
      uint8_t bytes[16];
      memcpy(bytes, &fill, 16);
      for (int64_t b = 0; b < nbytes; ++b) expected.push_back(bytes[b % 16]);
    }
  }
  writer.finish();
  CHECK(expected.empty() || memcmp(begin, expected.data(), expected.size()) == 0);
  for (const uint8_t* byte = room; byte < room + sizeof(room); ++byte) {
    if (byte == begin) byte += expected.size();
    CHECK(*byte == 0xEE);
  }
}

TEST(test_every_mover_writes_every_byte_and_no_other) {
  Random random(5);
  for (int64_t alignment = 0; alignment < kLineBytes; ++alignment) {
    for (int trial = 0; trial < 40; ++trial) {
      check_pieces<CachedWriter>(&random, alignment);
      cpu::visit_lines([&](auto lines) {
        check_pieces<cpu::NontemporalWriter<decltype(lines)>>(&random, alignment);
        return false;
      });
    }
  }
}

// Other threads see non-temporal stores only after a fence.
TEST(test_a_worker_ends_with_a_fence) {
#if defined(__x86_64__)
  static int num_fences = 0;
  struct Counted : cpu::Sse2Lines {
    static void fence() {
      ++num_fences;
      Sse2Lines::fence();
    }
  };
  alignas(kLineBytes) uint8_t room[4 * kLineBytes];
  const std::vector<uint8_t> from(sizeof(room), 7);
  for (const int64_t nbytes : {4 * kLineBytes, kLineBytes + 5, kLineBytes - 5}) {
    num_fences = 0;
    cpu::NontemporalWriter<Counted> writer;
    writer.copy(room, from.data(), nbytes);
    writer.finish();
    CHECK(num_fences == 1);
  }
#endif
}

PadShapes planes(const std::vector<uint8_t>& source, int64_t height, int64_t width) {
  return {1, {3, height, width}, {3, height, width - 1}, {{source.data(), {}}}, {}};
}

TEST(test_large_copies_of_long_rows_are_streamed) {
  const int64_t cache = cpu::last_cache_bytes();
  CHECK(cache >= 1024 * 1024 && cache <= 32 * 1024 * 1024);
  const std::vector<uint8_t> none(1);
  const auto streamed = [&](int64_t height, int64_t width) {
    uint8_t dst = 0;
    const PadShapes shapes = planes(none, height, width);
    return cpu::is_nontemporal(BoxPlan(&dst, shapes).table());
  };
  CHECK(streamed(cache / 2 / 1000, 1000));
  CHECK(!streamed(cache / 10 / 1000, 1000));
  CHECK(!streamed(cache / 2 / 100, 100));
}

TEST(test_large_copies_are_whole) {
  const int64_t height = cpu::last_cache_bytes() / 6 / 1001 + 2;
  Random random(6);
  const auto source = random_bytes(&random, 3 * height * 1000);
  const PadShapes shapes = planes(source, height, 1001);
  std::vector<uint8_t> dst(static_cast<size_t>(3 * height * 1001 + 7), 0xEE);
  const BoxPlan plan(dst.data() + 5, shapes);
  CHECK(cpu::is_nontemporal(plan.table()));
  cpu::pad_copy(plan.table(), kNoBoxes);
  bool same = true;
  for (int64_t row = 0; row < 3 * height; ++row) {
    const uint8_t* to = dst.data() + 5 + row * 1001;
    same = same && memcmp(to, source.data() + row * 1000, 1000) == 0 && to[1000] == 0;
  }
  CHECK(same);
  CHECK(dst[4] == 0xEE && dst[dst.size() - 2] == 0xEE && dst.back() == 0xEE);
}

// Leaves of ascending sizes, with gaps of 1 to 63 bytes and more between them.
TEST(test_large_packs_are_streamed_and_whole) {
  const int64_t nbytes = cpu::last_cache_bytes() / 2 + 3 * kLineBytes;
  Random random(7);
  const auto source = random_bytes(&random, nbytes);
  std::vector<uint8_t> expected(static_cast<size_t>(nbytes));
  std::vector<Slot> slots;
  int64_t offset = kLineBytes;
  for (int64_t size = 1; next_slot(offset, size, &offset) && offset + size < nbytes;
       size += 1 + size / 2) {
    slots.push_back({source.data() + size % 61, offset, size});
    memcpy(expected.data() + offset, slots.back().src, static_cast<size_t>(size));
    offset += size + random.between(0, 200);
  }
  std::vector<uint8_t> slab(static_cast<size_t>(nbytes) + 8, 0xEE);
  const auto num_slots = static_cast<int64_t>(slots.size());
  const Pack body{slab.data() + 1, nbytes, 1, slots.data(), num_slots};
  CHECK(num_slots > 20 && cpu::is_nontemporal(body));
  cpu::pack(body);
  CHECK(memcmp(slab.data() + 1, expected.data(), expected.size()) == 0);
  CHECK(slab[0] == 0xEE && slab[expected.size() + 1] == 0xEE && slab.back() == 0xEE);
  CHECK(!cpu::is_nontemporal({nullptr, nbytes, 1, nullptr, nbytes / 500}));
  CHECK(!cpu::is_nontemporal({nullptr, nbytes, 1, nullptr, 1, nbytes / 2}));
}

}  // namespace
